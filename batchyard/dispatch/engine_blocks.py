"""What the engine blocks in Prefect say of their models, or said last, for the scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from batchyard.errors import DispatchFailed, SettingsError
from batchyard.logs import event_logger
from batchyard.schedule.hours import why_closed

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.store import Store

log = event_logger(__name__)

_ASK_SECONDS: Final = 10.0
"""How often Prefect is asked for changed blocks."""


class EngineBlocks:
    """Keeps hours in the database as they are in Prefect, and knows which models are live."""

    def __init__(self, api: PrefectApi, store: Store) -> None:
        self._api = api
        self._store = store
        self._asked_at = -math.inf
        self._trouble = ""
        self.live: frozenset[str] | None = None
        """Models whose engines take live requests too; None: Prefect has not said yet."""

    async def look(self, now: float) -> None:
        """Ask Prefect, if that was not done just now. What it does not say stays as it was.

        Raises :class:`~batchyard.errors.StoreError`.
        """
        # A clock that was set back must not keep blocks unread until it has caught up.
        if not 0 <= now - self._asked_at < _ASK_SECONDS:
            await self.look_again(now)

    async def look_again(self, now: float) -> bool:
        """Ask Prefect, also if that was done just now; whether it has said which models are live.

        Raises what :meth:`look` does.
        """
        self._asked_at = now
        has_said = False
        trouble = ""
        try:
            offered = await self._api.offered_models()
        except (DispatchFailed, SettingsError) as error:
            trouble = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Runners are scheduled all the same.
            trouble = f"Prefect's answer is not as expected ({type(error).__name__})."
        else:
            self.live = frozenset(model.name for model in offered if model.is_live)
            has_said = True
            meaningless = [model.name for model in offered if model.hours is None]
            if meaningless:
                trouble = (
                    f"The batch_hours of {', '.join(meaningless)} are not valid: correct them."
                )
            hours = {model.name: model.hours for model in offered if model.hours is not None}
            await self._store.engine_hours.record(hours)
        if trouble and trouble != self._trouble:
            log.warning("hours.not_read", trouble)
        self._trouble = trouble
        return has_said

    async def closed(self, models: Collection[str], now: float) -> dict[str, str]:
        """Why each of these models waits for its hours; those that are open are not named.

        Raises :class:`~batchyard.errors.StoreError`.
        """
        hours = await self._store.engine_hours.all()
        reasons = {
            model: why_closed(model, hours[model], now) for model in models if model in hours
        }
        return {model: reason for model, reason in reasons.items() if reason is not None}
