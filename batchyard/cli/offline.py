"""Services for commands that look at batches but never run one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.dispatch import OfferedModels
from batchyard.services.services import open_services
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services


@asynccontextmanager
async def offline_services(*, checks_keys: bool = True) -> AsyncIterator[Services]:
    """Services for a command that runs no engine.

    Raises :class:`~batchyard.errors.SettingsError` when the settings cannot be used.
    """
    async with open_services(
        read_settings(),
        why_not_offered=OfferedModels().why_not,
        checks_keys=checks_keys,
    ) as services:
        yield services
