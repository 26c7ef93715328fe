"""``batchyard keys``: the keys of the API. A key is shown only once, when it is created."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.offline import offline_services
from batchyard.cli.table import print_table, user_text
from batchyard.time_words import relative

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.text import Text

    from batchyard.store import ApiKeyRecord, NewKey

_COLUMNS = ("id", "tenant", "name", "key", "made", "used", "state")

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that says who uses the key, or for what.")
    ],
    tenant: Annotated[
        str, typer.Option(help="The tenant whose files and batches the key gives access to.")
    ] = "default",
) -> None:
    """Create a key and print it. Only its hash is stored, so it cannot be shown again."""
    made = asyncio.run(_create(tenant, name))
    typer.echo(made.secret)
    typer.echo(f"batchyard: {made.record.id} is shown only this once: keep it.", err=True)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
) -> None:
    """List keys, oldest first, including revoked ones."""
    keys, now = asyncio.run(_list(tenant))
    print_table(_COLUMNS, _rows(keys, now))


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key.")]) -> None:
    """Revoke a key, at once and permanently."""
    asyncio.run(_revoke(key_id))


async def _create(tenant: str, name: str) -> NewKey:
    async with offline_services() as services:
        return await services.store.api_keys.create(tenant, name)


async def _list(tenant: str | None) -> tuple[Sequence[ApiKeyRecord], float]:
    """Keys, and the time by the clock that theirs are by."""
    async with offline_services() as services:
        keys = await services.store.api_keys.list(tenant)
        return keys, await services.store.database.now()


async def _revoke(key_id: str) -> None:
    async with offline_services() as services:
        await services.store.api_keys.revoke(key_id)


def _rows(keys: Iterable[ApiKeyRecord], now: float) -> Iterator[tuple[str | Text, ...]]:
    for key in keys:
        yield (
            key.id,
            user_text(key.tenant),
            user_text(key.name),
            f"{key.prefix}…",
            relative(key.created_at - now),
            relative(key.last_used_at - now) if key.last_used_at else "never",
            "revoked" if key.revoked_at else "valid",
        )
