"""``batchyard models``: which models are configured, their engines, or why there is none."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.as_json import LINES, print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import make_table, user_text, write_table
from batchyard.dispatch import PrefectApi
from batchyard.errors import BatchyardError
from batchyard.lifecycle import BatchStatus
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from batchyard.services.services import Services
    from batchyard.store import RunnerRecord

_COLUMNS = (
    *("model", "pool", "engines", "slots", "waiting requests", "tokens/s", "KV cache", "why none"),
)
_RIGHT = frozenset({"engines", "slots", "waiting requests", "tokens/s", "KV cache"})
_NOTHING = "-"
_PATIENCE_SECONDS = 10.0
_MOST_BATCHES = 1_000


@dataclass(frozen=True, slots=True)
class _Configured:
    """What Prefect says; None: it did not answer, and ``why_not`` says why."""

    models: frozenset[str] | None
    slots: dict[str, int | None]
    """By pool, how many engines its workers run at a time; None: there is no limit."""
    why_not: str = ""
    live: frozenset[str] = frozenset()
    """The models that are to take live requests."""
    adapters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The adapters that each model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    name: str
    adapters: Sequence[str]
    """Their names, which requests may carry as well."""
    pool: str
    is_configured: bool | None
    """None: Prefect did not say."""
    engines_ready: int
    engines_loading: int
    engines_draining: int
    engines_live: int
    """Of those that are ready: how many take live requests."""
    slots: int | None
    waiting_requests: int
    tokens_per_second: float | None
    """The speed of one engine, as measured so far."""
    cache_used: float | None
    """The share of the KV cache in use, 0 to 1, of its fullest engine; None: not known."""
    why_none: str | None
    """Why no engine serves it now."""


def models(as_json: Annotated[bool, LINES] = False) -> None:
    """List configured models with their engines and waiting requests, or why no engine runs.

    What is configured is in Prefect, at PREFECT_API_URL; without it, only models that have work
    or were measured are listed.
    """
    found, why_not = asyncio.run(_found())
    if as_json:
        print_lines(map(asdict, found))
    else:
        write_table(make_table(_COLUMNS, map(_row, found), right=_RIGHT))
    if why_not:
        typer.echo(f"batchyard: It is not known which models are configured: {why_not}", err=True)
    elif not found:
        typer.echo(
            "batchyard: No model is configured: name them in a file, and run `batchyard deploy`.",
            err=True,
        )


async def _found() -> tuple[list[_Model], str]:
    async with offline_services() as services:
        store = services.store
        backlog = {each.model: each.requests for each in (await store.figures.read()).backlog}
        rates = {
            (each.model, each.pool): each.tokens_per_second for each in await store.rates.all()
        }
        runners = await store.runners.live(
            kind=RunnerKind.CHUNKS, within_seconds=services.settings.lease_seconds
        )
        live = await store.live_engines.open(services.settings.lease_seconds)
        waits = await _waits(services, backlog)
        pool_of = services.settings.pool_of
        known = {*backlog, *(model for model, _ in rates), *(each.model or "" for each in runners)}
        configured = await _configured(known, services)
        names = sorted(known | (configured.models or frozenset()))
        found = []
        for name in names:
            pool = pool_of(name)
            its_runners = [each for each in runners if each.model == name]
            is_configured = None if configured.models is None else name in configured.models
            requests = backlog.get(name, 0)
            found.append(
                _Model(
                    name=name,
                    adapters=configured.adapters.get(name, ()),
                    pool=pool,
                    is_configured=is_configured,
                    **_engines(its_runners),
                    engines_live=sum(each.model == name for each in live),
                    slots=configured.slots.get(pool),
                    waiting_requests=requests,
                    tokens_per_second=rates.get((name, pool)),
                    cache_used=max(_caches_used(its_runners), default=None),
                    why_none=None
                    if any(each.ready_at for each in its_runners)
                    else _why_none(
                        is_configured,
                        its_runners,
                        bool(requests) or name in configured.live,
                        waits.get(name),
                        no_room_in=pool if configured.slots.get(pool, 1) == 0 else None,
                    ),
                )
            )
        return found, configured.why_not


def _caches_used(runners: Sequence[RunnerRecord]) -> list[float]:
    """The share of the cache that is used, of each runner that reports it."""
    loads = (each.load for each in runners)
    return [each.cache_used for each in loads if each and each.cache_used is not None]


def _engines(runners: Sequence[RunnerRecord]) -> dict[str, int]:
    draining = [each for each in runners if each.status is RunnerStatus.DRAINING]
    live = [each for each in runners if each.status is RunnerStatus.LIVE]
    ready = [each for each in live if each.ready_at is not None]
    return {
        "engines_ready": len(ready),
        "engines_loading": len(live) - len(ready),
        "engines_draining": len(draining),
    }


def _why_none(
    is_configured: bool | None,
    runners: Sequence[RunnerRecord],
    is_wanted: bool,
    wait: str | None,
    *,
    no_room_in: str | None,
) -> str:
    if runners:
        return "An engine is loading it, or is about to end."
    if wait is not None:
        return wait
    if is_configured is False:
        return "No engine block in Prefect names it: `batchyard deploy` makes one."
    if no_room_in is not None:
        return f"The work pool {no_room_in} does not exist, or its limit is 0."
    if not is_wanted:
        return "No batch needs it."
    return "An engine will be started for it."


async def _waits(services: Services, backlog: Mapping[str, int]) -> dict[str, str]:
    """Why the batches of each model wait."""
    batches = await services.store.batches.page(unfinished=True, limit=_MOST_BATCHES)
    # A parent may wait for the model of a part: others have the last word.
    batches.sort(key=lambda each: not each.is_parent)
    return {
        batch.model: batch.wait_reason
        for batch in batches
        if batch.model and batch.wait_reason and batch.status is BatchStatus.IN_PROGRESS
        if not batch.is_parent or backlog.get(batch.model)
    }


async def _configured(known: set[str], services: Services) -> _Configured:
    if not os.environ.get("PREFECT_API_URL"):
        return _Configured(None, {}, "PREFECT_API_URL is not set.")
    pool_of = services.settings.pool_of
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS), PrefectApi.from_environment() as api:
            offered = await api.offered_models()
            names = frozenset(each.name for each in offered)
            live = frozenset(each.name for each in offered if each.is_live)
            slots = {}
            for pool in {pool_of(name) for name in names | known}:
                slots[pool] = await api.pool_limit(pool) if await api.has_pool(pool) else 0
            adapters = {each.name: each.adapters for each in offered}
            return _Configured(names, slots, live=live, adapters=adapters)
    except TimeoutError:
        return _Configured(None, {}, "Prefect is too slow.")
    except BatchyardError as error:
        return _Configured(None, {}, str(error))


def _row(model: _Model) -> tuple[str | Text, ...]:
    engines = f"{model.engines_ready}"
    if model.engines_live:
        engines += f", {model.engines_live} live"
    if model.engines_loading:
        engines += f", {model.engines_loading} loading"
    if model.engines_draining:
        engines += f", {model.engines_draining} draining"
    speed = model.tokens_per_second
    names = model.name
    if model.adapters:
        names += f" + {', '.join(model.adapters)}"
    return (
        user_text(names),
        model.pool,
        engines,
        _NOTHING if model.slots is None else f"{model.slots}",
        f"{model.waiting_requests:,}",
        _NOTHING if not speed else f"{speed:,.0f}",
        _NOTHING if model.cache_used is None else f"{model.cache_used:.0%}",
        user_text(model.why_none or ""),
    )
