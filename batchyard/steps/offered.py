"""Refuse a batch whose model no engine serves, before an engine is moved for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.errors import ModelNotFound
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from batchyard.services.services import Services

log = event_logger(__name__)


async def check_offered(services: Services, model: str) -> None:
    """Raise :class:`~batchyard.errors.ModelNotFound` for a model that is not offered.

    One that was served before passes: its block may be missing for a moment, for example after
    the loss of Prefect's database, and its batches can wait. Every model passes while Prefect
    does not answer.
    """
    why_not = await services.why_not_offered(model)
    if why_not is None:
        return
    if await services.store.rates.knows(model):
        log.warning("model.not_offered_now", "It was served before: it may wait.", model=model)
        return
    raise ModelNotFound(why_not)
