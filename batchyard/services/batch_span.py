"""Spans of a batch's trace; see :mod:`batchyard.logs.tracing`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from batchyard.errors import StoreError
from batchyard.logs.tracing import NO_SPAN, Span, is_on, span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from batchyard.logs.tracing import Value
    from batchyard.services.services import Services

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    _Step = Callable[Concatenate[Services, str, P], Coroutine[Any, Any, R]]


@asynccontextmanager
async def batch_span(
    services: Services, name: str, batch_id: str, **attributes: Value | None
) -> AsyncIterator[Span]:
    """A span of the batch's trace for the block; none where tracing is off."""
    if not is_on():
        yield NO_SPAN
        return
    try:
        batch = await services.store.batches.get(batch_id)
    except StoreError:
        # The block meets it itself, if it matters there.
        yield NO_SPAN
        return
    about = {"batch": batch_id, "tenant": batch.tenant, "model": batch.model}
    with span(name, batch.options.traceparent, **about, **attributes) as made:
        yield made


def traced(name: str) -> Callable[[_Step[P, R]], _Step[P, R]]:
    """Have each call of a step of a batch be a span of the batch's trace."""

    def decorate(step: _Step[P, R]) -> _Step[P, R]:
        @wraps(step)
        async def run(services: Services, batch_id: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
            async with batch_span(services, name, batch_id):
                return await step(services, batch_id, *args, **kwargs)

        return run

    return decorate
