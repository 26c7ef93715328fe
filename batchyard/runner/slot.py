"""Engine slots: which GPUs of this machine an engine may have. One engine for each, never two."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.errors import EngineStartFailed, LeaseLost, StoreError
from batchyard.services.interruption import Interruption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """``devices`` is what ``CUDA_VISIBLE_DEVICES`` is to be; None: every device."""

    name: str
    devices: str | None


class NoSlotFree(EngineStartFailed):
    """Other engines have every slot of this machine."""


@asynccontextmanager
async def engine_slot(services: Services) -> AsyncIterator[EngineSlot]:
    """A slot of this machine while the block runs.

    Waits for one as long as that of a dead runner may last, then raises :class:`NoSlotFree`. A
    slot that is lost (this process was stopped for longer than a lease) cancels the block and is
    raised as :class:`~batchyard.errors.LeaseLost`: another engine is about to have its devices.
    """
    settings, leases = services.settings, services.store.leases
    owner = f"slot_{secrets.token_hex(16)}"
    slots = {slot.name: slot for slot in _slots(services)}
    give_up_at = time.monotonic() + settings.lease_seconds + settings.look_seconds
    while True:
        name = await leases.acquire_one_of(list(slots), owner, settings.lease_seconds)
        if name is not None:
            break
        if time.monotonic() > give_up_at:
            raise NoSlotFree(
                f"No engine slot is free on {settings.this_machine}: the concurrency limit of the "
                f"work pool {settings.pool} is higher than the {len(slots)} of BATCHYARD_ENGINE_SLOTS, or a "
                "container of the same host has the same hostname: see BATCHYARD_MACHINE."
            )
        await asyncio.sleep(settings.look_seconds)
    interruption = Interruption()
    renewal = asyncio.create_task(_renew(services, name, owner, interruption), name="engine slot")
    try:
        async with interruption:
            yield slots[name]
        if interruption.has_happened:
            raise LeaseLost(f"The engine slot {name} has another owner; its engine stops.")
    finally:
        renewal.cancel()
        await asyncio.wait([renewal])
        await leases.release(name, owner)


def _slots(services: Services) -> list[EngineSlot]:
    settings = services.settings
    place = f"slot/{settings.pool}/{settings.this_machine.identity}"
    if not settings.engine_slots:
        return [EngineSlot(f"{place}/all", None)]
    return [EngineSlot(f"{place}/{devices}", devices) for devices in settings.engine_slots]


async def _renew(services: Services, name: str, owner: str, interruption: Interruption) -> None:
    lease_seconds = services.settings.lease_seconds
    while True:
        await asyncio.sleep(lease_seconds / 3)
        try:
            is_ours = await services.store.leases.renew(name, owner, lease_seconds)
        except StoreError as error:
            logger.warning("slot.not_renewed slot=%s %s", name, error)
            continue
        if not is_ours:
            interruption.now()
            return
