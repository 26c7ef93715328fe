"""Services for commands that look at batches but never run one."""

from __future__ import annotations

import asyncio
import getpass
import os
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.cli.terminal.say import say
from batchyard.dispatch import OfferedModels
from batchyard.errors import OlderTables, StoreUnavailable
from batchyard.services.machine.shared_database import check_shared_database
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.store import acting_as

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services

_LOOK_SECONDS = 1.0


@asynccontextmanager
async def offline_services(*, checks_keys: bool = True) -> AsyncIterator[Services]:
    """Services for a command that runs no engine.

    Raises :class:`~batchyard.errors.SettingsError` when the settings cannot be used.
    """
    offered = OfferedModels()
    async with open_services(
        read_settings(),
        why_not_offered=offered.why_not,
        endpoints_of=offered.endpoints,
        find_offer=offered.offer,
        checks_keys=checks_keys,
    ) as services:
        with acting_as(_actor(services)):
            yield services


def _actor(services: Services) -> str:
    """Who the audit log says does it: the user of the command, and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = f"uid {os.getuid()}"
    return f"{user}@{services.settings.this_machine}"


@asynccontextmanager
async def services_with_tables() -> AsyncIterator[Services]:
    """The same, for a process that serves.

    It waits until the database answers and is migrated, and says so. Raises
    :class:`~batchyard.errors.SettingsError` for SQLite where several machines are meant.
    """
    check_shared_database(read_settings())
    said = ""
    async with AsyncExitStack() as stack:
        while True:
            try:
                services = await stack.enter_async_context(offline_services())
                break
            except (OlderTables, StoreUnavailable) as error:
                if said != str(error):
                    said = str(error)
                    say(f"batchyard: {said} Waiting for it.", err=True)
            await asyncio.sleep(_LOOK_SECONDS)
        yield services
