"""Refuse a batch that no engine serves, before an engine is moved for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.lines.endpoints import IN_VLLM, not_served_words
from batchyard.logs import event_logger
from batchyard.logs.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.services.services import Services

log = event_logger(__name__)

_SHOWN_CHARS: Final = 100


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
    # The name is a client's, has any length, and may be a prompt in the wrong place.
    log.warning("model.not_offered", why_not.remedy, model=printable(model[:_SHOWN_CHARS], "?"))
    raise why_not


async def endpoints_not_served(
    services: Services, endpoints: Iterable[str], model: str | None
) -> dict[str, str]:
    """The endpoints among these that no engine of the model can serve, each with the reason.

    Without a model: no engine at all. What vLLM serves passes: whether the model's vLLM does
    shows when it runs.
    """
    doubtful = [endpoint for endpoint in endpoints if endpoint not in IN_VLLM]
    served = await services.endpoints_of(model) if doubtful else None
    if served is None:
        return {}
    return {each: not_served_words(each, served) for each in doubtful if each not in served}
