"""Engine slots: one engine for each, whoever dies or sleeps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from batchyard import settings as settings_module
from batchyard.errors import LeaseLost
from batchyard.processes import machine
from batchyard.runner.slot import NoSlotFree, engine_slot
from batchyard.store.leases import LEASES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from tests.steps.conftest import Yard


def with_slots(yard: Yard, *devices: str, lease_seconds: float = 60.0) -> Services:
    yard.set(engine_slots=list(devices), lease_seconds=lease_seconds)
    return yard.services


def impatient(services: Services) -> Services:
    """Another process of the machine; it gives up at once where no slot is free."""
    settings = services.settings.model_copy(update={"lease_seconds": 0.1})
    return replace(services, settings=settings)


async def test_each_engine_gets_devices_of_its_own(yard: Yard) -> None:
    services = with_slots(yard, "0", "1,2")
    async with engine_slot(services) as first, engine_slot(services) as second:
        assert {first.devices, second.devices} == {"0", "1,2"}


async def test_a_machine_without_a_setting_has_one_slot_with_every_device(yard: Yard) -> None:
    services = with_slots(yard)
    async with engine_slot(services) as slot:
        assert slot.devices is None
        with pytest.raises(NoSlotFree, match="No engine slot is free"):
            async with engine_slot(impatient(services)):
                pass


async def test_a_slot_is_free_again_when_its_engine_has_stopped(yard: Yard) -> None:
    services = with_slots(yard, "0")
    for _ in range(2):
        async with engine_slot(services) as slot:
            assert slot.devices == "0"


@pytest.mark.alone
async def test_a_slot_is_kept_for_longer_than_one_lease(yard: Yard) -> None:
    services = with_slots(yard, "0", lease_seconds=0.6)
    async with engine_slot(services):
        await asyncio.sleep(1.4)
        with pytest.raises(NoSlotFree):
            async with engine_slot(impatient(services)):
                pass


async def test_the_slot_of_a_dead_runner_is_waited_for(yard: Yard) -> None:
    services = with_slots(yard, "0")
    async with engine_slot(services) as slot:
        name = slot.name
    assert await services.store.leases.claim(name, "a dead runner", 0.2)
    async with engine_slot(services) as slot:
        assert slot.name == name


async def test_an_engine_whose_slot_is_lost_is_stopped(yard: Yard) -> None:
    """Its process stood still for longer than a lease, and another engine has the devices."""
    services = with_slots(yard, "0", lease_seconds=0.3)
    with pytest.raises(LeaseLost, match="has another owner"):
        await _serve_until_robbed(services)


async def test_pools_do_not_share_slots(yard: Yard) -> None:
    services = with_slots(yard, "0")
    other = replace(services, settings=services.settings.model_copy(update={"pool": "h200"}))
    async with engine_slot(services) as one, engine_slot(other) as two:
        assert one.name != two.name


async def test_two_machines_with_one_hostname_do_not_share_slots(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloned images, `localhost`: what differs is the boot id of their kernels."""
    services = with_slots(yard, "0")
    async with engine_slot(services) as here:
        other_boot = tmp_path / "boot_id"
        other_boot.write_text("c3a1d9b2-1c8f-4f7e-8a77-5b9f2e6d4c22\n")
        there = partial(machine.this_machine, boot_id=other_boot)
        monkeypatch.setattr(settings_module, "this_machine", there)
        async with engine_slot(services) as slot:
            assert slot.devices == here.devices == "0"


async def test_containers_of_one_host_share_slots_by_a_common_name(yard: Yard) -> None:
    services = with_slots(yard, "0")
    yard.set(machine="gpu-host")
    async with engine_slot(yard.services):
        with pytest.raises(NoSlotFree, match="on gpu-host"):
            async with engine_slot(impatient(yard.services)):
                pass
        async with engine_slot(services):
            """A container with a hostname of its own has its own slots."""


async def _serve_until_robbed(services: Services) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(LEASES.update().values(owner="another"))

    async with engine_slot(services):
        await services.store.database.write(work)
        await asyncio.sleep(5)
