"""Engine slots: which GPUs of this machine an engine may use. Each slot has one engine at most."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard import intervals
from batchyard.errors import EngineStartFailed, LeaseLost
from batchyard.services.leases.renewal import renewing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services
    from batchyard.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """``devices`` is the value for ``CUDA_VISIBLE_DEVICES``; None: all devices."""

    name: str
    devices: str | None

    @property
    def label(self) -> str:
        """Which one of this machine's it is, for metrics."""
        return self.devices or "all"


class NoSlotFree(EngineStartFailed):
    """Other engines use all slots of this machine."""


@asynccontextmanager
async def engine_slot(services: Services) -> AsyncIterator[EngineSlot]:
    """A slot of this machine while the block runs.

    Waits for as long as the lease of a crashed runner may last, then raises :class:`NoSlotFree`.
    If the slot is lost (this process was stopped for longer than a lease), the block is cancelled
    and :class:`~batchyard.errors.LeaseLost` is raised: another engine is about to use its devices.
    """
    settings, leases = services.settings, services.store.leases
    owner = f"slot_{secrets.token_hex(16)}"
    slots = {slot.name: slot for slot in slots_of(settings)}
    give_up_at = time.monotonic() + settings.lease_seconds + intervals.LOOK_SECONDS
    while True:
        name = await leases.claim_one_of(list(slots), owner, settings.lease_seconds)
        if name is not None:
            break
        if time.monotonic() > give_up_at:
            raise NoSlotFree(
                f"No engine slot is free on {settings.this_machine}: the concurrency limit of the "
                f"work pool {settings.pool} is higher than the {len(slots)} of "
                "BATCHYARD_ENGINE_SLOTS, or a container of the same host has the same hostname: "
                "see BATCHYARD_MACHINE."
            )
        await asyncio.sleep(intervals.LOOK_SECONDS)

    async def renew() -> None:
        if not await leases.renew(name, owner, settings.lease_seconds):
            raise LeaseLost(f"The engine slot {name} has another owner; its engine stops.")

    try:
        async with renewing(renew, every_seconds=settings.lease_seconds / 3, what=name):
            yield slots[name]
    finally:
        await leases.release(name, owner)


def slots_of(settings: Settings) -> list[EngineSlot]:
    """The slots of this machine for the engines of this process's pool."""
    place = f"slot/{settings.pool}/{settings.this_machine.identity}"
    if not settings.engine_slots:
        return [EngineSlot(f"{place}/all", None)]
    return [EngineSlot(f"{place}/{devices}", devices) for devices in settings.engine_slots]
