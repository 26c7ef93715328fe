"""Prefect's worker for Slurm: it submits flow runs as jobs, and watches the jobs of its pool.

Nothing that it has to know is only in its memory. A job carries the id of its flow run, and Prefect
has the id of the job; so a worker that is started again, on any login node, goes on where the last
one was. The jobs need no worker: they start, run and end without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import Scheduled
from prefect.workers.base import BaseWorker, BaseWorkerResult

from batchyard.dispatch.run_states import in_queue
from batchyard.logs.log_words import describe
from batchyard.processes.threads import in_thread
from batchyard.settings import read_settings
from batchyard.settings_sources import CONFIG_VARIABLE
from commands.prefect_worker.listening import Listening
from commands.slurm import TYPE, cluster
from commands.slurm.job_script import lead_seconds, script_of, words_of
from commands.slurm.template import JobConfiguration, JobVariables
from commands.slurm.verdict import Cancel, Seen, SetState, Tell, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    import anyio.abc
    from prefect.client.schemas.objects import FlowRun

    from commands.slurm.cluster import Job

LOOK_SECONDS: Final = 5.0
"""Between two looks at all jobs: one call of Slurm, and one of Prefect."""
_AGAIN_SECONDS: Final = 15.0
"""A flow run whose job Slurm did not take is submitted again after this."""
_UNENDED: Final = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_PAGE: Final = 200


class Result(BaseWorkerResult):
    """That a job was submitted. How it ends is seen later."""


class SlurmWorker(Listening, BaseWorker[JobConfiguration, JobVariables, Result]):
    """A worker on a login node, or wherever Slurm's commands are."""

    type = TYPE
    job_configuration = JobConfiguration
    job_configuration_variables = JobVariables
    _description = "Flow runs as jobs of Slurm."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watching: asyncio.Task[None] | None = None
        self._missed: set[str] = set()
        """Flow runs for which Slurm had no job at the last look."""
        self._told: set[str] = set()
        self._trouble = ""

    async def setup(self) -> None:
        """Set up as Prefect's own does, and begin to watch."""
        await super().setup()
        self._watching = asyncio.create_task(self._watch())

    async def teardown(self, *exc_info: Any) -> None:
        """Leave the jobs alone."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await super().teardown(*exc_info)

    # -- submitting -------------------------------------------------------------------------

    async def run(
        self,
        flow_run: FlowRun,
        configuration: JobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> Result:
        """Submit a job, or put the flow run off if Slurm does not take it now."""
        job_id = ""
        try:
            job_id = await self._submit(flow_run, configuration)
        except Exception as error:  # noqa: BLE001 - Prefect would end it, and count it as a failure
            with contextlib.suppress(Exception):  # as above; it is seen to have no job
                await self._put_off(flow_run, _why(error))
        if task_status is not None:
            task_status.started(job_id)
        return Result(identifier=job_id, status_code=0)

    async def _submit(self, flow_run: FlowRun, configuration: JobConfiguration) -> str:
        flow_run_id = str(flow_run.id)
        for job in await cluster.jobs_of(self._work_pool_name):
            # The answer to the first attempt was lost.
            if job.flow_run_id == flow_run_id and not job.has_ended:
                return job.id
        folder = await in_thread(_output_folder, configuration)
        words = words_of(
            configuration,
            name=configuration.name or flow_run.name,
            comment=cluster.comment_of(self._work_pool_name, flow_run_id),
            output=str(folder / "slurm-%j.log"),
        )
        return await cluster.submit(words, script_of(configuration), _environment(configuration))

    async def _put_off(self, flow_run: FlowRun, why: str) -> None:
        self.get_flow_run_logger(flow_run).warning("Slurm did not take its job: %s", why)
        again = datetime.now(UTC) + timedelta(seconds=_AGAIN_SECONDS)
        message = f"Slurm did not take the job: {why}"
        state = Scheduled(scheduled_time=again, name=in_queue("not submitted"), message=message)
        await self.client.set_flow_run_state(flow_run.id, state)

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: JobConfiguration,  # noqa: ARG002 - Prefect's signature
        grace_seconds: int = 30,  # noqa: ARG002 - as above
    ) -> None:
        """Take a job away that has not begun; Prefect calls it for a cancelled flow run."""
        await cluster.cancel(infrastructure_pid)

    # -- watching ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                if self._work_pool is not None:
                    await self._look()
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - Slurm's or Prefect's: the next look may go better
                if self._trouble != (trouble := _why(error)):
                    self._trouble = trouble
                    self._logger.warning("Jobs cannot be watched: %s", trouble)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        # Slurm first: a job that has ended has told Prefect before how its flow run ended.
        jobs = cluster.by_flow_run(await cluster.jobs_of(self._work_pool_name))
        runs = {str(run.id): run for run in await self._unended()}
        active = {id_ for id_, job in jobs.items() if not job.has_ended}
        runs |= {str(run.id): run for run in await self._read(active - runs.keys())}
        found = {id_: _job_of(run, jobs.get(id_)) for id_, run in runs.items()}
        submitting = {str(id_) for id_ in self._submitting_flow_run_ids}
        missed = {id_ for id_, job in found.items() if job is None} - submitting
        trouble: Exception | None = None
        for id_, run in runs.items():
            if id_ in submitting or id_ in missed - self._missed:
                continue
            try:
                await self._carry_out(run, found[id_])
            except Exception as error:  # noqa: BLE001 - it is raised once the others are seen to
                trouble = error
        self._missed = missed
        self._told &= active
        if trouble is not None:
            raise trouble

    @property
    def _lead_seconds(self) -> int:
        """As the pool's template has it; a deployment with a longer drain is told by Slurm only."""
        variables = self.work_pool.base_job_template.get("variables", {}).get("properties", {})
        return lead_seconds(int(variables.get("drain_seconds", {}).get("default") or 0))

    async def _carry_out(self, run: FlowRun, job: Job | None) -> None:
        what = verdict(job, _seen(run), time.time() + self._lead_seconds)
        if job is not None and run.infrastructure_pid != job.id:
            # The worker that has submitted it did not get that far.
            await self.client.update_flow_run(run.id, infrastructure_pid=job.id)
        match what:
            case SetState():
                await self._set(run, what)
            case Tell() if job is not None and job.flow_run_id not in self._told:
                await cluster.tell(job.id)
                self._told.add(job.flow_run_id)
            case Cancel() if job is not None:
                await cluster.cancel(job.id)

    async def _set(self, run: FlowRun, what: SetState) -> None:
        # Not by force: what the flow run itself has said since is what counts.
        state: State[Any] = State(type=StateType(what.type), name=what.name, message=what.message)
        await self.client.set_flow_run_state(run.id, state)
        if what.type != StateType.PENDING.value:
            self.get_flow_run_logger(run).info(what.message)

    async def _unended(self) -> list[FlowRun]:
        wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNENDED)))
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[self._work_pool_name]))
        runs: list[FlowRun] = []
        while True:
            page = await self.client.read_flow_runs(
                flow_run_filter=wanted, work_pool_filter=pool, limit=_PAGE, offset=len(runs)
            )
            runs += page
            if len(page) < _PAGE:
                return runs

    async def _read(self, flow_run_ids: Iterable[str]) -> list[FlowRun]:
        ids = [UUID(each) for each in flow_run_ids][:_PAGE]
        if not ids:
            return []
        return await self.client.read_flow_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids))
        )


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, cluster.SlurmFailed | OSError) else describe(error)


def _job_of(run: FlowRun, job: Job | None) -> Job | None:
    """The job, unless it ended before the flow run was submitted again."""
    noted = run.infrastructure_pid
    return None if job is not None and job.has_ended and noted not in {None, "", job.id} else job


def _seen(run: FlowRun) -> Seen:
    state = run.state
    if state is None:
        return Seen("")
    seconds = time.time() - state.timestamp.timestamp()
    return Seen(state.type.value, state.name or "", seconds, run.infrastructure_pid or None)


def _output_folder(configuration: JobConfiguration) -> Path:
    folder = Path(configuration.output_folder or read_settings().home_folder / "logs")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _environment(configuration: JobConfiguration) -> dict[str, str]:
    """What the job has of its own: Prefect's address and login, and where the settings are.

    They are the environment of the job, which only its user and Slurm can read.
    """
    given = {name: value for name, value in configuration.env.items() if value is not None}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = {"PATH": path, "BATCHYARD_DRAIN_SECONDS": str(configuration.drain_seconds)}
    if CONFIG_VARIABLE in os.environ:
        found[CONFIG_VARIABLE] = os.environ[CONFIG_VARIABLE]
    return found | given
