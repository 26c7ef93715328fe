"""What an engine says that it takes, and which endpoints it does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.engine.routes import is_served
from batchyard.errors import EngineLost
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from batchyard.engine.base import Engine
    from batchyard.lines.body_fields import Routes

log = event_logger(__name__)


async def routes_of(engine: Engine) -> Routes | None:
    """What the engine says that it takes; None where it says nothing, or nothing readable."""
    try:
        return await engine.routes()
    except EngineLost:
        # The window will find that the engine is lost, and start it again.
        return None
    except Exception as error:  # noqa: BLE001 - a list that cannot be read is no list
        log.warning("engine.routes_not_read", type(error).__name__)
        return None


def missing_endpoints(routes: Routes | None) -> frozenset[str]:
    """The endpoints that an engine with these routes does not have; none where it lists none."""
    if routes is None:
        return frozenset()
    return frozenset(url for url in ENDPOINTS if not is_served(url, routes))
