"""Start, watch and end flow runs over Prefect's REST API. Only this package calls that API.

It uses HTTP, so that a process that only has to start a runner never imports Prefect.

===================  ========================================================================
``prefect_api``      the calls
``prefect_http``     how a call is made: login, CSRF token, retries
``prefect_answers``  a flow run and other answers, as values
``lost_runs``        ends flow runs that have no process any more
``queued_runs``      cancels what waits in a cluster's queue and is not needed any more
``unheard_cancels``  cancels in the database what a flow run's process is not told
``batch_runner``     starts the runner of batches
``standby``          the flow run that takes over if a process is lost
``scheduler``        starts and drains the runners of chunks, with ``model_watch``
``scheduler_lease``  whose turn it is to do so
``engine_blocks``    which models wait for the hours of their engines, and which are live
``live_models``      which models have a runner without any batches
``status_events``    sends the statuses of batches to Prefect as events
``offered``          which models have an engine block
===================  ========================================================================
"""

from batchyard.dispatch.batch_runner import ensure_batch_runner
from batchyard.dispatch.lost_runs import RECONCILER_LEASE, end_lost_runs
from batchyard.dispatch.offered import OfferedModels, block_name, block_remedy
from batchyard.dispatch.prefect_answers import FlowRun, OfferedModel, offer_of
from batchyard.dispatch.prefect_api import (
    PROCESS_BATCH,
    RECONCILE,
    RUN_BATCHES,
    RUN_CHUNKS,
    TAKEN_UP,
    PrefectApi,
)
from batchyard.dispatch.prefect_http import checked_api_url
from batchyard.dispatch.scheduler import GivenUp, RunnerScheduler
from batchyard.dispatch.standby import Standby, start_reconciler
from batchyard.dispatch.status_events import batch_resource, report_status_changes

__all__ = [
    "PROCESS_BATCH",
    "RECONCILE",
    "RECONCILER_LEASE",
    "RUN_BATCHES",
    "RUN_CHUNKS",
    "TAKEN_UP",
    "FlowRun",
    "GivenUp",
    "OfferedModel",
    "OfferedModels",
    "PrefectApi",
    "RunnerScheduler",
    "Standby",
    "batch_resource",
    "block_name",
    "block_remedy",
    "checked_api_url",
    "end_lost_runs",
    "ensure_batch_runner",
    "offer_of",
    "report_status_changes",
    "start_reconciler",
]
