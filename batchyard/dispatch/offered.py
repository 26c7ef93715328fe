"""Which models the engine blocks in Prefect offer, for those who are to refuse the others."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

from batchyard.dispatch.prefect_api import ENGINE_BLOCKS, PrefectApi
from batchyard.errors import DispatchFailed, SettingsError
from batchyard.logs import event_logger
from batchyard.printable import printable

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
        self._names: frozenset[str] = frozenset()
        self._asked_at = self._failed_at = -_KEPT_SECONDS
        self._asking = asyncio.Lock()

    async def why_not(self, model: str) -> str | None:
        """Why no engine serves the model, and what to do; None: one does, or it is not known."""
        async with self._asking:
            now = time.monotonic()
            if now - self._asked_at < _KEPT_SECONDS and model in self._names:
                return None
            if now - self._failed_at < _PAUSE_SECONDS:
                return None
            names = await _ask()
            if names is None:
                self._failed_at = time.monotonic()
                return None
            self._names, self._asked_at = names, time.monotonic()
        return None if model in names else _missing(model)


async def _ask() -> frozenset[str] | None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS), PrefectApi.from_environment() as api:
            return frozenset(model.name for model in await api.offered_models())
    except (TimeoutError, DispatchFailed, SettingsError) as error:
        reason = str(error) or "Prefect is too slow."
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"Prefect's answer is not as expected ({type(error).__name__})."
    log.info("models.not_known", reason)
    return None


def _missing(model: str) -> str:
    shown = printable(model[:_SHOWN_CHARS], "?")
    return (
        f"The model {shown} is not offered here: correct the name, or create a block named "
        f"{block_name(shown)} of the type {' or '.join(ENGINE_BLOCKS)}."
    )
