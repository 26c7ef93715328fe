"""``batchyard migrate``: make or change the tables of the database, before anything uses them."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.say import say
from batchyard.errors import StoreUnavailable, TablesInUse
from batchyard.services.machine.connections import connections
from batchyard.services.machine.home import in_home
from batchyard.settings import read_settings
from batchyard.store import PATIENCE_SECONDS, upgrade

_PAUSE_SECONDS = 1.0


def migrate(
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="How many seconds to wait for the database, for backups that read it, and for "
            "older processes to end.",
        ),
    ] = 60.0,
    although_used: Annotated[
        bool,
        typer.Option(help="Do not check whether older processes are running. They stop working."),
    ] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Bring the database's tables up to this version, and return when that is done.

    It may be repeated, and run by several machines at once. No other command changes the tables of
    a database that BATCHYARD_DATABASE_URL names. Where older processes could not use the new
    tables, it waits until they have ended, and then fails.
    """
    settings = read_settings()
    database = connections(settings)["Database"]
    if not as_json:
        say(f"Database: {database}")
    with in_home(settings):
        pass  # SQLite would say only that it cannot open a file
    unused_for = None if although_used else settings.lease_seconds
    revision = asyncio.run(_migrate(settings.database, wait, unused_for))
    if as_json:
        print_object({"database": database, "new_revision": revision})
    else:
        say(f"Tables: now revision {revision}" if revision else "Tables: up to date")


async def _migrate(url: str, wait_seconds: float, unused_for_seconds: float | None) -> str | None:
    deadline, said = time.monotonic() + wait_seconds, ""
    while True:
        patience = min(PATIENCE_SECONDS, max(1.0, deadline - time.monotonic()))
        try:
            return await upgrade(
                url, patience_seconds=patience, unused_for_seconds=unused_for_seconds
            )
        except (StoreUnavailable, TablesInUse) as error:
            if time.monotonic() >= deadline:
                raise
            if isinstance(error, TablesInUse) and said != str(error):
                said = str(error)
                say(f"batchyard: {said} Waiting for it.", err=True)
        await asyncio.sleep(_PAUSE_SECONDS)
