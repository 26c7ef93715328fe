"""Settings of Prefect's server with which it leaves most of the processor to batches."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from docket import Worker

_SERVICES = "PREFECT_SERVER_SERVICES_"

LEAN_SERVER: Final = {
    # Task runs are written together, at most a second late: a third of the time for each.
    f"{_SERVICES}TASK_RUN_RECORDER_BATCH_SIZE": "50",
    f"{_SERVICES}TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    f"{_SERVICES}TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # Services that look for work every five seconds otherwise, also while nothing happens.
    f"{_SERVICES}LATE_RUNS_LOOP_SECONDS": "30",
    f"{_SERVICES}PAUSE_EXPIRATIONS_LOOP_SECONDS": "30",
    f"{_SERVICES}CLEANUP_RECONCILER_LOOP_SECONDS": "30",
    f"{_SERVICES}SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "30",
}
"""Variables of the server's environment; a user's own go before them. infra/ has the same."""

_LOOK_SECONDS: Final = timedelta(seconds=1)


def look_less_often(worker: type[Worker]) -> None:
    """Let this class look for the server's own tasks once a second, and not four times.

    With its tasks in the server's memory, as by default, each look is a program in Lua, and an idle
    server does little else. Prefect has no setting for it.
    """
    initialize = worker.__init__
    known = inspect.signature(initialize).parameters
    names = {"minimum_check_interval", "scheduling_resolution"} & known.keys()

    @functools.wraps(initialize)
    def initialize_slower(self: Worker, *given: Any, **named: Any) -> None:
        initialize(self, *given, **dict.fromkeys(names, _LOOK_SECONDS) | named)

    worker.__init__ = initialize_slower  # type: ignore[method-assign]  # Prefect has no setting for it
