"""What is to be done about a flow run, from what Slurm and Prefect say of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batchyard.dispatch.run_states import PUT_OFF, STOPPED, in_queue
from commands.slurm.cluster import CANCELLED, NOT_LAUNCHED, TAKEN

if TYPE_CHECKING:
    from commands.slurm.cluster import Job

_WAITING: Final = frozenset(
    {
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
        "RESV_DEL_HOLD",
    }
)
_REASON_CHARS: Final = 100
STARTING: Final = "Starting"
"""Prefect's state of a flow run whose job has its node, and which has not begun."""

LEAVE_SECONDS: Final = 60.0
"""What a job may take to end once its flow run has ended, or once it was told to end."""
_UNSUBMITTED_SECONDS: Final = 90.0
"""A flow run that a worker took so long ago is not about to be submitted: `sbatch` ends sooner."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A flow run as Prefect has it: the type and the name of its state, and for how long."""

    type: str
    name: str = ""
    seconds: float = 0.0
    job_id: str | None = None
    """What was noted as its infrastructure."""

    @property
    def has_ended(self) -> bool:
        return self.type in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True, slots=True)
class SetState:
    """Prefect is to be told a state: of a flow run that waits, or its end."""

    type: str
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Tell:
    """The job is to be told that it has to end."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The job is to be taken away."""


Verdict = SetState | Tell | Cancel | None


def waiting(job: Job) -> SetState:
    """The state of a flow run whose job has no node yet, with Slurm's reason."""
    reason = job.reason or job.state.lower()
    # Prefect has an index of the names, which takes no list of a thousand nodes.
    shown = reason[:_REASON_CHARS]
    return SetState("PENDING", in_queue(shown), f"in Slurm's queue: job {job.id} waits ({reason})")


def verdict(job: Job | None, seen: Seen, end_soon: float = -math.inf) -> Verdict:
    """``job`` is None where Slurm has none for the flow run, and had none at the last look.

    ``end_soon``: Unix seconds; a job that ends earlier has to be told.
    """
    if job is None:
        return _without_job(seen)
    if job.has_ended:
        return None if seen.has_ended else _end(job, seen)
    is_waiting = job.state in _WAITING
    if seen.has_ended:
        # One that runs is just leaving.
        return Cancel() if is_waiting or seen.seconds >= LEAVE_SECONDS else None
    if seen.type == "CANCELLING":
        return Cancel() if is_waiting or seen.seconds >= LEAVE_SECONDS else Tell()
    if seen.type != "PENDING":
        # A job that is preempted hears of it from Slurm only at the end of its grace time.
        return Tell() if job.ends_at <= end_soon else None
    wanted = waiting(job) if is_waiting else _starting(job)
    return None if seen.name == wanted.name else wanted


def _starting(job: Job) -> SetState:
    return SetState("PENDING", STARTING, f"Slurm's job {job.id} starts on {job.node}.")


def _end(job: Job, seen: Seen) -> SetState:
    reason = f", {job.reason}" if job.reason else ""
    where = f" on {job.node}" if job.node else ""
    message = f"Slurm's job {job.id}{where} has ended ({job.state}{reason})."
    if seen.type == "CANCELLING" or job.state == CANCELLED:
        return SetState("CANCELLED", "Cancelled", message)
    if job.state in TAKEN or job.reason == NOT_LAUNCHED:
        # Neither the runner nor its model is to blame.
        return SetState("COMPLETED", STOPPED, message)
    return SetState(
        "CRASHED", "Crashed", f"{message} Its output, slurm-{job.id}.log, has the cause."
    )


def _without_job(seen: Seen) -> SetState | None:
    if seen.type == "CANCELLING":
        return SetState("CANCELLED", "Cancelled", "Slurm has no job of it.")
    if seen.type != "PENDING":
        # The database knows whether it has a process.
        return None
    if seen.job_id is not None:
        message = f"Slurm no longer knows the job {seen.job_id}: it ended while nobody watched."
        return SetState("COMPLETED", PUT_OFF, message)
    if seen.seconds < _UNSUBMITTED_SECONDS:
        return None
    return SetState("SCHEDULED", "Scheduled", "Its worker ended before it had submitted a job.")
