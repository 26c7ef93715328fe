"""Settings of Prefect's server with which it leaves most of the processor to batches."""

from __future__ import annotations

from typing import Final

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
