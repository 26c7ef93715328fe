"""The calls of Slurm's commands, and a job as a value."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CALL_SECONDS: Final = 60.0
"""Slurm's commands wait for their controller for some tens of seconds."""
_SAID_CHARS: Final = 300
_OURS: Final = "batchyard"
_FIELDS: Final = "%A|%T|%N|%e|%r|%k"
"""Id, state, node, end, reason, and last the comment, which may have anything in it."""
_SECONDS: Final = {"SLURM_TIME_FORMAT": "%s"}
"""Times as Unix seconds."""
_KEPT_VARIABLES: Final = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SLURM_CONF", "TZ", "USER")
"""Of the worker's environment, what its commands and jobs have. Nothing else goes into a job."""

TAKEN: Final = frozenset({"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"})
"""The states in which a job ends whose node was taken away."""
NOT_LAUNCHED: Final = "JobLaunchFailure"
"""The reason of a job that Slurm could not start, or that its node has lost in a restart."""
CANCELLED: Final = "CANCELLED"
ENDED: Final = TAKEN | {CANCELLED, "COMPLETED", "FAILED", "OUT_OF_MEMORY"}


class SlurmFailed(Exception):
    """Slurm did not do what was asked. The message has what its command said."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of ours. ``state`` and ``reason`` are Slurm's words; ``node``: empty without one."""

    id: str
    flow_run_id: str
    state: str
    reason: str = ""
    node: str = ""
    ends_at: float = math.inf
    """In Unix seconds: its time limit, or the end of its grace time if another job preempts it."""

    @property
    def has_ended(self) -> bool:
        """Whether Slurm is done with it."""
        return self.state in ENDED


def comment_of(pool: str, flow_run_id: str) -> str:
    """The comment of a job, by which a worker that was started again finds whose it is."""
    return f"{_OURS} {pool} {flow_run_id}"


def jobs_in(listing: str, pool: str) -> list[Job]:
    """The pool's jobs in what `squeue` printed."""
    jobs = []
    for line in listing.split("\n"):
        # Others of this user's jobs may have comments of several lines.
        job_id, state, node, end, reason, comment = [*line.split("|", 5), *[""] * 5][:6]
        flow_run_id = comment.rpartition(" ")[2]
        if comment == comment_of(pool, flow_run_id) and _is_uuid(flow_run_id):
            reason = "" if reason == "None" else reason
            jobs.append(Job(job_id, flow_run_id, state, reason, node, _time(end)))
    return jobs


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Such as N/A, for a job without a limit.
        return math.inf


def by_flow_run(jobs: Iterable[Job]) -> dict[str, Job]:
    """The job of each flow run: of several, one that has not ended, or the newest.

    A flow run that somebody has run again has the job of the first time as well.
    """
    return {job.flow_run_id: job for job in sorted(jobs, key=_weight)}


def _weight(job: Job) -> tuple[bool, int]:
    return not job.has_ended, int(job.id)


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


async def jobs_of(pool: str) -> list[Job]:
    """All jobs of the pool that this user has, also those that have ended, by one call.

    Those that ended more than Slurm's ``MinJobAge`` ago are no longer among them. Raises
    :class:`SlurmFailed`.
    """
    words = ["squeue", "--me", "--all", "--states=all", "--noheader", f"--format={_FIELDS}"]
    return jobs_in(await _call(words, variables() | _SECONDS), pool)


async def submit(words: Sequence[str], script: str, environment: Mapping[str, str]) -> str:
    """Submit the script; the job's id. Raises :class:`SlurmFailed`.

    The job may have been submitted even so, if the controller's answer was lost.
    """
    said = await _call(words, variables() | dict(environment), script)
    # With several clusters it is ID;CLUSTER.
    return said.strip().partition(";")[0]


async def cancel(job_id: str) -> None:
    """End the job, or take it from the queue. Nothing happens to one that has ended."""
    await _call(["scancel", job_id], variables())


async def tell(job_id: str) -> None:
    """Send SIGTERM to the job's script, which lets its runner drain."""
    await _call(["scancel", "--batch", "--signal=TERM", job_id], variables())


def variables() -> dict[str, str]:
    """What a job has of the environment of this process."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}


async def _call(words: Sequence[str], environment: Mapping[str, str], given: str = "") -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=dict(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SlurmFailed(
            f"{words[0]} cannot be started ({error.strerror}): run this worker where Slurm's "
            "commands are, for example on a login node."
        ) from error
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            said, complaint = await process.communicate(given.encode())
    except TimeoutError:
        raise SlurmFailed(f"{words[0]} did not end within {_CALL_SECONDS:.0f} s.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        words_said = " ".join(complaint.decode(errors="replace").split())[:_SAID_CHARS]
        raise SlurmFailed(words_said or f"{words[0]} ended with {process.returncode}.")
    return said.decode(errors="replace")
