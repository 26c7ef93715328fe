"""``batchyard audit``: what operators did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.as_json import LINES, print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import print_table, user_text
from batchyard.logs.time_words import bare_moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.text import Text

    from batchyard.store import AuditRecord

_COLUMNS = ("time (UTC)", "who", "action", "of", "details")


def audit(
    action: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only actions that begin with this, for example key or batch.cancelled.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="How many to list, newest first.", min=1, max=100_000)
    ] = 50,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """List what operators did: keys, quotas, logins, batches that they cancelled or paused."""
    records = asyncio.run(_newest(limit, action))
    if as_json:
        print_lines(record.model_dump() for record in records)
    else:
        print_table(_COLUMNS, _rows(records))


async def _newest(limit: int, action: str | None) -> Sequence[AuditRecord]:
    async with offline_services() as services:
        return await services.store.audit.newest(limit=limit, action=action)


def _rows(records: Sequence[AuditRecord]) -> Iterator[tuple[str | Text, ...]]:
    for each in records:
        details = ", ".join(
            f"{name}={value}" for name, value in each.details.items() if value is not None
        )
        yield (
            bare_moment(each.at),
            user_text(each.actor),
            each.action,
            user_text(each.subject),
            user_text(details),
        )
