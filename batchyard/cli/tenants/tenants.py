"""``batchyard tenants``: who has batches here, their limits, addresses and use."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.cli.tenants.notify_email import email
from batchyard.cli.tenants.quota import quota
from batchyard.cli.tenants.usage import usage
from batchyard.cli.terminal.as_json import LINES, print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import make_table, user_text, write_table
from batchyard.services.quotas import default_quota

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from batchyard.store import Quota, TenantUsage

_COLUMNS = (
    *("tenant", "active batches", "enqueued requests", "enqueued tokens", "stored bytes"),
    *("keys", "e-mail"),
)

app = typer.Typer(
    help="List tenants, and set and show their limits, addresses and use.", no_args_is_help=True
)
app.command("quota")(quota)
app.command("email")(email)
app.command("usage")(usage)


@dataclass(frozen=True, slots=True)
class _Tenant:
    name: str
    used: TenantUsage
    limits: Quota
    keys: int
    """Valid ones."""
    notify_email: str | None


@app.command("list")
def list_tenants(as_json: Annotated[bool, LINES] = False) -> None:
    """List all tenants with what they have enqueued and their limits."""
    tenants = asyncio.run(_tenants())
    if as_json:
        print_lines(map(_object, tenants))
        return
    rows: list[Sequence[str | Text]] = [
        (user_text(each.name), *_used(each), f"{each.keys}", user_text(each.notify_email or "-"))
        for each in tenants
    ]
    write_table(make_table(_COLUMNS, rows, right=_COLUMNS[1:6]))


async def _tenants() -> list[_Tenant]:
    async with offline_services() as services:
        store = services.store
        now = await store.database.now()
        keys = [key.tenant for key in await store.api_keys.list() if key.is_valid(now)]
        defaults = default_quota(services)
        return [
            _Tenant(
                name,
                await store.tenants.usage(name),
                (await store.tenants.quota(name)).over(defaults),
                keys.count(name),
                await store.tenants.notify_email(name),
            )
            for name in await store.tenants.names()
        ]


def _used(tenant: _Tenant) -> Sequence[str]:
    """``3 of 20``, or ``3`` without a limit."""
    limits = tenant.limits.model_dump()
    return [
        f"{used:,}" if (limit := limits[f"max_{name}"]) is None else f"{used:,} of {limit:,}"
        for name, used in asdict(tenant.used).items()
    ]


def _object(tenant: _Tenant) -> dict[str, Any]:
    return {
        "tenant": tenant.name,
        "used": asdict(tenant.used),
        "limits": tenant.limits.model_dump(),
        "keys": tenant.keys,
        "notify_email": tenant.notify_email,
    }
