"""Tells a batch what its engine will do with it, before the engine gets the first line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.lines.body_fields import ignored_fields
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.patience import patiently

if TYPE_CHECKING:
    from batchyard.engine.base import Engine
    from batchyard.lines.body_fields import Routes
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_PATIENCE_SECONDS: Final = 10.0


async def note_engine(
    services: Services, batch: BatchRecord, engine: Engine, routes: Routes | None
) -> None:
    """Record the fields that it ignores, and whether its answers depend on other requests.

    Raises what the store raises, if it does so for long: the second one is a promise to the user.
    """
    await _note_ignored(services, batch, routes)
    before = batch.options.batch_invariant
    is_invariant = engine.is_batch_invariant
    if before is None or (before and not is_invariant):
        note = services.store.batch_effects.note_engine
        await patiently(lambda: note(batch.id, is_batch_invariant=is_invariant), "an engine")


async def _note_ignored(services: Services, batch: BatchRecord, routes: Routes | None) -> None:
    """Record the fields that no route of the engine has. Raises nothing: no line depends on it.

    Nothing is recorded of a batch that its tenant does not see.
    """
    if routes is None or batch.is_hidden:
        return
    ignored = ignored_fields(batch.options.fields, routes)
    if ignored == batch.options.ignored:
        return
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await services.store.batch_effects.note_ignored(batch.id, ignored)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("fields.not_noted", describe(error), batch=batch.id)
