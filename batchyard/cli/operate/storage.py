"""``batchyard storage``: continue with a database that was restored from a backup."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.filesize import decimal

from batchyard.cli.terminal.offline import offline_services
from batchyard.errors import OtherState
from batchyard.files.retention import Swept, count_unknown
from batchyard.services.restore.storage_mark import accept_storage, check_mark

app = typer.Typer(
    help="Continue with a database that was restored from a backup.", no_args_is_help=True
)


@app.callback()
def storage() -> None:
    """Continue with a database that was restored from a backup."""


@app.command()
def accept(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let clean-ups delete again what this database does not name.

    They stop when the object store was used with a newer state of the database, or with another
    one. This command says what they will delete, and asks.
    """
    asyncio.run(_accept(is_asked=not yes))


async def _accept(*, is_asked: bool) -> None:
    async with offline_services() as services:
        try:
            await check_mark(services)
        except OtherState as error:
            typer.echo(str(error).partition(". ")[0] + ".")
        else:
            typer.echo("The object store is the one that this database knows: nothing to do.")
            return
        typer.echo(_in_words(await count_unknown(services)))
        if is_asked:
            typer.confirm("Continue with this database?", abort=True)
        await accept_storage(services)
        await services.store.audit.note("storage.accepted", services.settings.this_machine.name)
        typer.echo("Accepted.")


def _in_words(unknown: Swept) -> str:
    return (
        f"Objects that the database does not name: {unknown.objects:,} ({decimal(unknown.bytes)}). "
        "The next clean-ups delete those that are older than a day."
    )
