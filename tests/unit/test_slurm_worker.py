"""The worker of a Slurm pool, with a Slurm and a Prefect that say what a test wants."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPool

from batchyard.dispatch.run_states import is_in_queue
from commands.slurm import TYPE, cluster
from commands.slurm.cluster import Job
from commands.slurm.options import JobOptions
from commands.slurm.template import JobConfiguration, base_job_template
from commands.slurm.worker import SlurmWorker

if TYPE_CHECKING:
    from pathlib import Path

RUN = uuid.UUID(int=7)


@dataclass
class Told:
    """What Slurm and Prefect have, and what they were told."""

    jobs: list[Job] = field(default_factory=list)
    runs: list[FlowRun] = field(default_factory=list)
    states: list[State[Any]] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    refusal: str = ""

    async def read_flow_runs(self, **asked: Any) -> list[FlowRun]:
        ids = asked["flow_run_filter"].id
        if ids is not None:
            return [run for run in self.runs if run.id in ids.any_]
        unended = asked["flow_run_filter"].state.type.any_
        return [run for run in self.runs if run.state and run.state.type in unended]

    async def update_flow_run(self, _: uuid.UUID, infrastructure_pid: str) -> None:
        self.noted.append(infrastructure_pid)

    async def set_flow_run_state(self, _: uuid.UUID, state: State[Any]) -> None:
        self.states.append(state)

    async def jobs_of(self, _: str) -> list[Job]:
        return self.jobs

    async def submit(self, words: list[str], script: str, environment: dict[str, str]) -> str:
        if self.refusal:
            raise cluster.SlurmFailed(self.refusal)
        assert "sbatch" in words
        assert "batchyard execute" in script
        assert "SECRET" not in script
        assert environment["BATCHYARD_DRAIN_SECONDS"] == "60"
        self.submitted.append(environment["PREFECT_API_AUTH_STRING"])
        return "9"

    async def cancel(self, job_id: str) -> None:
        if self.refusal:
            raise cluster.SlurmFailed(self.refusal)
        self.cancelled.append(job_id)

    async def tell(self, job_id: str) -> None:
        if self.refusal:
            raise cluster.SlurmFailed(self.refusal)
        self.told.append(job_id)

    def started(self, job_id: str) -> None:
        self.noted.append(job_id)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    told = Told()
    for name in ("jobs_of", "submit", "cancel", "tell"):
        monkeypatch.setattr(cluster, name, getattr(told, name))
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    return told


@pytest.fixture
def worker(told: Told, monkeypatch: pytest.MonkeyPatch) -> SlurmWorker:
    worker = SlurmWorker(work_pool_name="gpu")
    worker._client = told  # type: ignore[assignment]
    worker._work_pool = WorkPool(
        name="gpu", type=TYPE, base_job_template=base_job_template(JobOptions())
    )
    monkeypatch.setattr(worker, "get_flow_run_logger", lambda _: logging.getLogger("test"))
    return worker


def flow_run(
    state: str, name: str = "", *, job: str | None = None, ago: float = 0.0, id_: uuid.UUID = RUN
) -> FlowRun:
    since = datetime.now(UTC) - timedelta(seconds=ago)
    made: State[Any] = State(type=StateType(state), name=name or state, timestamp=since)
    return FlowRun(
        id=id_, name="model", flow_id=uuid.UUID(int=8), state=made, infrastructure_pid=job
    )


def configuration() -> JobConfiguration:
    return JobConfiguration.model_validate({"env": {"PREFECT_API_AUTH_STRING": "SECRET"}})


async def test_a_job_that_an_earlier_worker_did_not_note_is_found(
    worker: SlurmWorker, told: Told
) -> None:
    told.jobs = [Job("9", str(RUN), "PENDING", "Priority")]
    told.runs = [flow_run("PENDING", "Submitting", ago=9999)]
    await worker._look()
    assert told.noted == ["9"]
    assert [state.name for state in told.states] == ["InQueue (Priority)"]


async def test_a_login_is_given_to_a_job_as_its_environment(
    worker: SlurmWorker, told: Told
) -> None:
    result = await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    assert (result.identifier, told.noted, told.submitted) == ("9", ["9"], ["SECRET"])


async def test_a_job_whose_submission_had_no_answer_is_not_submitted_twice(
    worker: SlurmWorker, told: Told
) -> None:
    told.jobs = [Job("8", str(RUN), "PENDING", "Priority")]
    await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    assert (told.noted, told.submitted) == (["8"], [])
    told.jobs = [Job("8", str(RUN), "FAILED")]
    await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    assert told.noted == ["8", "9"]


async def test_what_slurm_does_not_take_is_submitted_again_soon(
    worker: SlurmWorker, told: Told
) -> None:
    told.refusal = "sbatch: error: invalid partition specified: gpu"
    await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    (state,) = told.states
    assert state.type is StateType.SCHEDULED
    assert is_in_queue(state.name or "")
    assert state.message == f"Slurm did not take the job: {told.refusal}"
    assert state.state_details.scheduled_time is not None
    assert state.state_details.scheduled_time > datetime.now(UTC)
    # Prefect notes nothing then.
    assert told.noted == [""]


async def test_a_file_of_settings_that_cannot_be_read_ends_no_flow_run(
    worker: SlurmWorker, told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the submission raises, Prefect would count against the model."""
    (tmp_path / "batchyard.toml").write_text("half of a")
    monkeypatch.setenv("BATCHYARD_CONFIG", str(tmp_path / "batchyard.toml"))
    await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    (state,) = told.states
    assert state.type is StateType.SCHEDULED
    assert "cannot be read as TOML" in (state.message or "")


async def test_a_prefect_that_is_away_when_slurm_takes_nothing_ends_no_flow_run(
    worker: SlurmWorker, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left as it is, and submitted again when it is seen to have no job."""

    async def lost(*_: object) -> None:
        raise httpx.ConnectError("gone")

    monkeypatch.setattr(told, "set_flow_run_state", lost)
    told.refusal = "sbatch: error: no"
    result = await worker.run(flow_run("PENDING"), configuration(), told)  # type: ignore[arg-type]
    assert (result.identifier, told.noted) == ("", [""])


async def test_a_job_that_is_not_there_is_looked_for_twice(worker: SlurmWorker, told: Told) -> None:
    """It may have been submitted after Slurm was asked."""
    told.runs = [flow_run("PENDING", "InQueue (Priority)", job="9")]
    await worker._look()
    assert told.states == []
    await worker._look()
    assert [state.type for state in told.states] == [StateType.COMPLETED]


async def test_a_submission_that_took_several_looks_counts_from_its_end(
    worker: SlurmWorker, told: Told
) -> None:
    """Its job may have come into the queue after Slurm was asked."""
    told.runs = [flow_run("PENDING", "Submitting")]
    worker._submitting_flow_run_ids.add(RUN)
    await worker._look()
    worker._submitting_flow_run_ids.clear()
    told.runs = [flow_run("PENDING", "Submitting", job="9")]
    await worker._look()
    assert told.states == []


async def test_the_job_of_the_first_time_says_nothing_of_a_flow_run_that_runs_again(
    worker: SlurmWorker, told: Told
) -> None:
    told.jobs = [Job("8", str(RUN), "FAILED")]
    told.runs = [flow_run("PENDING", "Submitting", job="9")]
    await worker._look()
    told.runs = [flow_run("PENDING", "Pending", job="8")]
    worker._submitting_flow_run_ids.add(RUN)
    await worker._look()
    assert told.states == []


async def test_a_job_of_another_prefect_is_left_alone(worker: SlurmWorker, told: Told) -> None:
    told.jobs = [Job("9", str(RUN), "PENDING", "Priority")]
    await worker._look()
    assert (told.states, told.noted, told.cancelled) == ([], [], [])


async def test_a_job_whose_flow_run_was_ended_is_cancelled(worker: SlurmWorker, told: Told) -> None:
    told.jobs = [Job("9", str(RUN), "PENDING", "Priority")]
    told.runs = [flow_run("CANCELLED", job="9")]
    await worker._look()
    assert told.cancelled == ["9"]


async def test_a_job_that_has_to_end_is_told_once(worker: SlurmWorker, told: Told) -> None:
    """A minute before its drain has to end, which is what the pool's file says of it."""
    told.runs = [flow_run("RUNNING", job="9")]
    for left in (130.0, 119.0, 60.0):
        told.jobs = [Job("9", str(RUN), "RUNNING", node="node1", ends_at=time.time() + left)]
        await worker._look()
        assert told.told == ([] if left > 120 else ["9"])


async def test_a_job_that_slurm_could_not_tell_is_told_at_the_next_look(
    worker: SlurmWorker, told: Told
) -> None:
    told.runs = [flow_run("RUNNING", job="9")]
    told.jobs = [Job("9", str(RUN), "RUNNING", node="node1", ends_at=time.time() + 60)]
    told.refusal = "scancel: error: no"
    with pytest.raises(cluster.SlurmFailed, match="scancel"):
        await worker._look()
    told.refusal = ""
    await worker._look()
    assert told.told == ["9"]


async def test_what_slurm_says_is_in_the_workers_log(
    worker: SlurmWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(_: str) -> list[Job]:
        raise cluster.SlurmFailed("Unable to contact slurm controller")

    monkeypatch.setattr(cluster, "jobs_of", lost)
    monkeypatch.setattr(worker, "_logger", logging.getLogger("test"))
    watching = asyncio.create_task(worker._watch())
    await asyncio.sleep(0.1)
    watching.cancel()
    assert "Jobs cannot be watched: Unable to contact slurm controller" in caplog.text


async def test_a_job_that_cannot_be_cancelled_keeps_no_other_from_its_state(
    worker: SlurmWorker, told: Told
) -> None:
    other = uuid.UUID(int=9)
    told.jobs = [Job("9", str(RUN), "PENDING"), Job("10", str(other), "PENDING", "Priority")]
    told.runs = [flow_run("CANCELLING", job="9"), flow_run("PENDING", job="10", id_=other)]
    told.refusal = "scancel: error: no"
    with pytest.raises(cluster.SlurmFailed, match="scancel"):
        await worker._look()
    assert [state.name for state in told.states] == ["InQueue (Priority)"]
