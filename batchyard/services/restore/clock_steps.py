"""Has the database make up for a clock that was set back, and says so in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.logs import event_logger
from batchyard.logs.time_words import duration

if TYPE_CHECKING:
    from batchyard.services.services import Services

log = event_logger(__name__)


async def make_up_for_clock(services: Services) -> None:
    """Call it before a lease or a heartbeat of others is read, and again now and then."""
    seconds = await services.store.clock_steps.make_up_for(services.settings.lease_seconds)
    if seconds:
        log.warning(
            "clock.set_back",
            f"The clock of the database was set back, by about {duration(seconds)}. What was "
            "leased until later is dated back by as much.",
        )
