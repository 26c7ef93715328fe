"""Which endpoints an engine does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.endpoints import ENDPOINTS
from batchyard.engine.routes import is_served
from batchyard.errors import EngineLost
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from batchyard.engine.base import Engine

log = event_logger(__name__)


async def missing_endpoints(engine: Engine) -> frozenset[str]:
    """The endpoints that the engine says it does not have; none if it does not list its routes."""
    try:
        routes = await engine.routes()
    except EngineLost:
        # The window will find that the engine is lost, and start it again.
        routes = None
    except Exception as error:  # noqa: BLE001 - a list that cannot be read is no list
        log.warning("engine.routes_not_read", type(error).__name__)
        routes = None
    if routes is None:
        return frozenset()
    return frozenset(url for url in ENDPOINTS if not is_served(url, routes))
