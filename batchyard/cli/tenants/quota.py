"""``batchyard tenants quota``: what a tenant has enqueued and stored, and its limits."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.services.quotas import default_quota
from batchyard.store import WhenFull

if TYPE_CHECKING:
    from batchyard.store import Quota

_MOST = 2**63 - 1
"""What the database's columns hold."""
_HELP = "A number, or none for the default of the settings."


def quota(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")],
    active_batches: Annotated[str | None, typer.Option(metavar="N|none", help=_HELP)] = None,
    requests: Annotated[str | None, typer.Option(metavar="N|none", help=_HELP)] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N|none", help=_HELP)] = None,
    stored_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="N|none", help="Of files, results and unfinished uploads together. " + _HELP
        ),
    ] = None,
    live_requests: Annotated[
        str | None,
        typer.Option(
            metavar="N|none",
            help="Live requests in flight, in each process of the API; 0 refuses them. " + _HELP,
        ),
    ] = None,
    when_full: Annotated[
        str | None,
        typer.Option(
            metavar="wait|refuse|none",
            help="What becomes of a batch for whose requests or tokens there is no room: it waits "
            "until earlier ones are done, or it fails. none: the default of the settings.",
        ),
    ] = None,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Set limits of a tenant, and show its usage and limits."""
    given = {
        "max_active_batches": ("--active-batches", active_batches),
        "max_enqueued_requests": ("--requests", requests),
        "max_enqueued_tokens": ("--tokens", tokens),
        "max_stored_bytes": ("--stored-bytes", stored_bytes),
        "max_live_requests": ("--live-requests", live_requests),
    }
    changes: dict[str, Any] = {
        name: _limit(option, text) for name, (option, text) in given.items() if text is not None
    }
    if when_full is not None:
        changes["when_full"] = _when_full(when_full)
    asyncio.run(_quota(tenant, changes, as_json))


def _limit(option: str, text: str) -> int | None:
    if text == "none":
        return None
    # Not int(): it takes signs, underscores and other scripts' digits, and refuses very many.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    if not (is_number and int(text) <= _MOST):
        raise typer.BadParameter(f"{text} is neither a number nor none.", param_hint=option)
    return int(text)


def _when_full(text: str) -> WhenFull | None:
    if text == "none":
        return None
    if text not in list(WhenFull):
        raise typer.BadParameter(
            f"{text} is neither wait nor refuse nor none.", param_hint="--when-full"
        )
    return WhenFull(text)


async def _quota(tenant: str, changes: dict[str, Any], as_json: bool) -> None:
    async with offline_services() as services:
        tenants = services.store.tenants
        own = await tenants.quota(tenant)
        if changes:
            own = own.model_copy(update=changes)
            await tenants.set_quota(tenant, own)
        usage = asdict(await tenants.usage(tenant))
        limits = own.over(default_quota(services)).model_dump()
    if as_json:
        print_object({"tenant": tenant, "used": usage, "limits": limits})
        return
    typer.echo(f"{'tenant ' + tenant:<20}{'used':>20}{'limit':>20}")
    for name, used in usage.items():
        limit = _limit_words(own, name, limits[f"max_{name}"])
        typer.echo(f"{name.replace('_', ' '):<20}{used:>20,}{limit}")
    default = "" if own.when_full else "  (default)"
    typer.echo(f"{'when full':<20}{'-':>20}{limits['when_full']:>20}{default}")
    # Each process of the API counts its own, so there is no number of those that are used.
    limit = _limit_words(own, "live_requests", limits["max_live_requests"])
    typer.echo(f"{'live requests':<20}{'-':>20}{limit}")


def _limit_words(own: Quota, name: str, limit: int | None) -> str:
    if limit is None:
        return f"{'none':>20}"
    is_own = getattr(own, f"max_{name}") is not None
    return f"{limit:>20,}" if is_own else f"{limit:>20,}  (default)"
