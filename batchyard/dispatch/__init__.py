"""Flow runs, started and watched over Prefect's REST API: nothing else here knows Prefect exists.

It speaks HTTP, so that a process that only has to wake a runner never imports Prefect.
``prefect_api`` asks, ``lost_runs`` ends what has no process any more, ``wake`` starts the runner
of batches, ``scheduler`` the runners of chunks; ``status_events`` says what becomes of batches;
``offered`` says which models there are.
"""

from batchyard.dispatch.lost_runs import bury_lost_runs
from batchyard.dispatch.offered import OfferedModels, block_name
from batchyard.dispatch.prefect_api import (
    PROCESS_BATCH,
    RUN_BATCHES,
    RUN_CHUNKS,
    TAKEN_UP,
    FlowRun,
    OfferedModel,
    PrefectApi,
)
from batchyard.dispatch.scheduler import GivenUp, RunnerScheduler
from batchyard.dispatch.status_events import batch_resource, tell_status_changes
from batchyard.dispatch.wake import wake_batch_runner

__all__ = [
    "PROCESS_BATCH",
    "RUN_BATCHES",
    "RUN_CHUNKS",
    "TAKEN_UP",
    "FlowRun",
    "GivenUp",
    "OfferedModel",
    "OfferedModels",
    "PrefectApi",
    "RunnerScheduler",
    "batch_resource",
    "block_name",
    "bury_lost_runs",
    "tell_status_changes",
    "wake_batch_runner",
]
