"""``batchyard tenants usage``: what tenants used, and what it cost."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from batchyard.batch.prices import BILLION, money
from batchyard.cli.terminal.as_json import LINES, print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import make_table, user_text, write_table
from batchyard.intervals import DAY_SECONDS

if TYPE_CHECKING:
    from rich.text import Text

    from batchyard.store import UsageTotal

_NUMBERS: Final = ("requests", "input", "cached", "output", "cost")


def usage(
    tenant: Annotated[
        str | None, typer.Argument(metavar="TENANT", help="Only this tenant. Default: all.")
    ] = None,
    days: Annotated[
        int, typer.Option(help="How many days in UTC, the current one included.", min=1, max=3660)
    ] = 30,
    daily: Annotated[bool, typer.Option("--daily", help="A line for each day.")] = False,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """Show what tenants used of each model, and what it cost.

    Batches count on the day on which they ended, live requests on the day on which they were
    answered.
    """
    totals = asyncio.run(_totals(days, tenant))
    if not daily:
        totals = _summed(totals)
    if as_json:
        print_lines(_object(each, daily=daily) for each in totals)
        return
    columns = (*(("day",) if daily else ()), "tenant", "model", "kind", *_NUMBERS)
    rows = (_row(each, daily=daily) for each in totals)
    write_table(make_table(columns, rows, right=_NUMBERS))


async def _totals(days: int, tenant: str | None) -> list[UsageTotal]:
    async with offline_services() as services:
        now = int(await services.store.database.now())
        return await services.store.usage.totals(
            start=(now // DAY_SECONDS - days + 1) * DAY_SECONDS,
            end=now + 1,
            width_seconds=DAY_SECONDS,
            groups=("tenant", "model", "is_live"),
            tenants=None if tenant is None else [tenant],
        )


def _summed(totals: list[UsageTotal]) -> list[UsageTotal]:
    """All days as one."""
    found: dict[tuple[str, str, bool, str], UsageTotal] = {}
    for each in totals:
        key = (each.tenant or "", each.model or "", bool(each.is_live), each.currency or "")
        found[key] = found[key].plus(each) if key in found else each
    return [found[key] for key in sorted(found)]


def _object(total: UsageTotal, *, daily: bool) -> dict[str, object]:
    values = asdict(total)
    bucket, cost = values.pop("bucket"), values.pop("cost")
    values["is_live"] = bool(total.is_live)
    values["cost"] = None if total.currency is None else cost / BILLION
    return {"day": _day(bucket), **values} if daily else values


def _row(total: UsageTotal, *, daily: bool) -> tuple[str | Text, ...]:
    return (
        *((_day(total.bucket),) if daily else ()),
        user_text(total.tenant or ""),
        user_text(total.model or ""),
        "live" if total.is_live else "batch",
        f"{total.requests:,}",
        f"{total.input_tokens:,}",
        f"{total.cached_tokens:,}",
        f"{total.output_tokens:,}",
        "" if total.currency is None else money(total.cost, total.currency),
    )


def _day(bucket: int) -> str:
    return datetime.fromtimestamp(bucket * DAY_SECONDS, UTC).strftime("%Y-%m-%d")
