"""What the engine blocks in Prefect offer, for those who are to refuse the rest."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from batchyard.dispatch.prefect_answers import offer_of
from batchyard.dispatch.prefect_api import ENGINE_BLOCKS, PrefectApi
from batchyard.errors import DispatchFailed, ModelNotFound, SettingsError
from batchyard.lines.endpoints import IN_VLLM
from batchyard.lines.offer import UNKNOWN, Offer
from batchyard.logs import event_logger
from batchyard.logs.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchyard.dispatch.prefect_answers import OfferedModel

log = event_logger(__name__)

_KEPT_SECONDS: Final = 60.0
"""A model that was offered is believed to be for as long as this; one that was not is asked for."""
_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 10.0
"""A Prefect that did not say is not asked again for as long as this: many batches may wait."""
_SHOWN_CHARS: Final = 100


def block_name(model: str) -> str:
    """The block document's name for a model: ``org/Model-3.1-8B`` is ``org-model-3-1-8b``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


class OfferedModels:
    """What Prefect said last, for one process."""

    def __init__(self) -> None:
        self._models: dict[str, OfferedModel] = {}
        self._asked_at = self._failed_at = -_KEPT_SECONDS
        self._asking = asyncio.Lock()

    async def why_not(self, model: str) -> ModelNotFound | None:
        """Why no engine serves the model, and what to do; None: one does, or it is not known."""
        offer = await self.offer([model])
        return None if not offer.is_known or offer.has(model) else _missing(model)

    async def offer(self, names: Collection[str] = ()) -> Offer:
        """The models and their adapters. If any of ``names`` is not known, Prefect is asked."""
        models = await self._known(lambda known: all(map(offer_of(known.values()).has, names)))
        return UNKNOWN if models is None else offer_of(models.values())

    async def endpoints(self, model: str | None) -> frozenset[str] | None:
        """The endpoints that the engine of the model may serve, or any engine without a model.

        None: it is not known.
        """
        # A server that is not ours may be added at any time: an old answer would refuse its batch.
        models = await self._known(lambda _: False)
        if models is None:
            return None
        if model is not None:
            model = offer_of(models.values()).model_of(model)
        asked = [each for each in models.values() if model in {None, each.name}]
        return IN_VLLM if asked and all(each.is_ours for each in asked) else None

    async def _known(
        self, is_enough: Callable[[dict[str, OfferedModel]], bool]
    ) -> dict[str, OfferedModel] | None:
        """The models by name: those known already if that ``is_enough``; None: not known."""
        async with self._asking:
            now = time.monotonic()
            if now - self._asked_at < _KEPT_SECONDS and is_enough(self._models):
                return self._models
            if now - self._failed_at < _PAUSE_SECONDS:
                return None
            models = await _ask()
            if models is None:
                self._failed_at = time.monotonic()
                return None
            self._models, self._asked_at = models, time.monotonic()
            return models


async def _ask() -> dict[str, OfferedModel] | None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS), PrefectApi.from_environment() as api:
            return {model.name: model for model in await api.offered_models()}
    except (TimeoutError, DispatchFailed, SettingsError) as error:
        reason = str(error) or "Prefect is too slow."
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"Prefect's answer is not as expected ({type(error).__name__})."
    log.info("models.not_known", reason)
    return None


def _missing(model: str) -> ModelNotFound:
    shown = printable(model[:_SHOWN_CHARS], "?")
    return ModelNotFound(
        f"The model {shown} is not offered here: correct the name, or ask for one of GET "
        "/v1/models.",
        remedy=block_remedy(shown),
    )


def block_remedy(model: str) -> str:
    """What an operator does about a model without an engine."""
    return (
        f"To serve it, create a block named {block_name(model)} of the type "
        f"{' or '.join(ENGINE_BLOCKS)}."
    )
