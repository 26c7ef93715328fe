"""A flow run in a forked process. Not Prefect's start, which takes seconds (ADR 74).

It is ``python -m prefect.engine``, with everything imported already.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import TYPE_CHECKING

import prefect.context
import prefect.flow_engine
import prefect.task_engine
from prefect.logging.configuration import setup_logging
from prefect.settings import PREFECT_LOGGING_EXTRA_LOGGERS

import flows.expire_files
import flows.process_batch
import flows.reconcile
import flows.run_batches
import flows.run_chunks
import flows.submit_batch
import flows.submit_new_files  # noqa: F401 - these are what is imported already

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENGINE = "prefect.engine"


def run_flow_run(environment: Mapping[bytes, bytes]) -> None:
    """Run the flow run that PREFECT__FLOW_RUN_ID names. Ends with SystemExit where Prefect does."""
    _use(environment)
    sys.argv = [_ENGINE]
    sys.modules.pop(_ENGINE, None)  # runpy warns of a module that is there already
    runpy.run_module(_ENGINE, run_name="__main__", alter_sys=True)


def _use(environment: Mapping[bytes, bytes]) -> None:
    """Take the variables, and have Prefect read again what it has read when it was imported."""
    for name in PREFECT_LOGGING_EXTRA_LOGGERS.value():
        logging.getLogger(name).handlers.clear()  # or each would be there twice
    os.environb.clear()
    os.environb.update(environment)
    prefect.context.refresh_global_settings_context()
    setup_logging(incremental=False)
