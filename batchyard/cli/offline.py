"""Services for commands that look at batches but never run one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.dispatch import OfferedModels
from batchyard.errors import SettingsError
from batchyard.services.services import open_services
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from batchyard.engine.base import Engine
    from batchyard.services.services import Services
    from batchyard.storage.bucket import S3Credentials


async def _no_credentials() -> S3Credentials:
    raise SettingsError("This command reads and writes no S3 locations.")


@asynccontextmanager
async def offline_services(
    *,
    checks_keys: bool = True,
    s3_credentials: Callable[[], Awaitable[S3Credentials]] = _no_credentials,
) -> AsyncIterator[Services]:
    """Services for a command that runs no engine.

    Raises :class:`~batchyard.errors.SettingsError` when the settings cannot be used.
    """
    async with open_services(
        read_settings(),
        engine_for=_no_engine,
        s3_credentials=s3_credentials,
        why_not_offered=OfferedModels().why_not,
        checks_keys=checks_keys,
    ) as services:
        yield services


async def _no_engine(model: str) -> Engine:
    raise SettingsError(f"This command runs no engine, so none for {model}.")
