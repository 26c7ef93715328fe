"""Prefect's process worker, changed: it forks our flow runs and listens to events (ADR 74)."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from commands.prefect_worker import forked_run
from commands.prefect_worker.listening import Listening
from flows.process.stop_signal import STOP

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

_OUR_FLOWS = "flows."


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it takes the place of Prefect's own is meant

    class BatchyardWorker(Listening, ProcessWorker):
        """Asks for flow runs when Prefect has announced some, and otherwise seldom."""


def use_fork_server(name: str) -> None:
    """Let flow runs of ours be forked by the server of this name."""
    words = [sys.executable, "-I", "-S", forked_run.__file__, name, str(int(STOP))]

    class Configuration(ProcessJobConfiguration):
        def prepare_for_flow_run(
            self,
            flow_run: FlowRun,
            deployment: DeploymentResponse | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            # Flows of others may have pull steps or requirements, which Prefect sees to.
            entrypoint = None if deployment is None else deployment.entrypoint
            if self.command is None and (entrypoint or "").startswith(_OUR_FLOWS):
                self.command = command_to_string(words)
            super().prepare_for_flow_run(flow_run, deployment, *args, **kwargs)

    BatchyardWorker.job_configuration = Configuration
