"""Which models wait for the hours of their engines, as Prefect's blocks say, or said last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from batchyard.errors import DispatchFailed, SettingsError
from batchyard.hours import why_closed
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.store import Store

log = event_logger(__name__)

_ASK_SECONDS: Final = 10.0
"""How often Prefect is asked for changed blocks."""


class EngineHours:
    """Keeps the hours in the database as they are in Prefect, for the scheduler."""

    def __init__(self, api: PrefectApi, store: Store) -> None:
        self._api = api
        self._store = store
        self._asked_at = -math.inf
        self._trouble = ""

    async def closed(self, models: Collection[str], now: float) -> dict[str, str]:
        """Why each of these models waits for its hours; those that are open are not named.

        Raises :class:`~batchyard.errors.StoreError`.
        """
        if models and now - self._asked_at >= _ASK_SECONDS:
            await self._read_blocks()
            self._asked_at = now
        hours = await self._store.engine_hours.all()
        reasons = {
            model: why_closed(model, hours[model], now) for model in models if model in hours
        }
        return {model: reason for model, reason in reasons.items() if reason is not None}

    async def _read_blocks(self) -> None:
        """Where Prefect does not say, or a block has hours that mean nothing, they stay."""
        trouble = ""
        try:
            offered = await self._api.offered_models()
        except (DispatchFailed, SettingsError) as error:
            trouble = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Runners are scheduled all the same.
            trouble = f"Prefect's answer is not as expected ({type(error).__name__})."
        else:
            meaningless = [model.name for model in offered if model.hours is None]
            if meaningless:
                trouble = f"The batch_hours of {', '.join(meaningless)} mean nothing: correct them."
            hours = {model.name: model.hours for model in offered if model.hours is not None}
            await self._store.engine_hours.record(hours)
        if trouble and trouble != self._trouble:
            log.warning("hours.not_read", trouble)
        self._trouble = trouble
