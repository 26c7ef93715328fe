"""What the ends of a model's runners mean: when to start the next one, and when to stop trying.

Pure. One failed runner says little about its model: another machine may serve it, and the cause may
be repaired. So the batches of a model fail only after a time in which all its runners failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchyard.dispatch.run_states import MACHINE_PAUSED, NO_ENGINE, PUT_OFF, STOPPED

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.store import RunnerRecord
    from batchyard.store.chunk.demand import ModelDemand

_LONGEST_PAUSE_SECONDS = 60.0
"""Between two starts of runners that get nowhere; after the first of them there is no pause."""
_MOST_DOUBLINGS = 10
"""The pause has its full length long before; a day of failures would overflow a float."""
_NEUTRAL = frozenset({PUT_OFF, MACHINE_PAUSED, NO_ENGINE, STOPPED})


@dataclass(slots=True)
class ModelWatch:
    """What was seen of a model since it has work. Times are Unix seconds."""

    answered: int
    chunks: int
    """Open, like the answers, at the last look."""
    runs: set[str] = field(default_factory=set)
    """Flow runs whose end has not been handled yet."""
    served_at: float | None = None
    """When it last had a runner."""
    idle_ends: int = 0
    """Runners in a row that ended without an answer, for any reason."""
    start_after: float = 0.0
    """No runner is started before this moment."""
    failures: int = 0
    """Runners that failed since the model's last answer."""
    failing_since: float | None = None
    """When the first of them did."""
    failed_at: float = 0.0
    """When the last one did."""
    is_unknown: bool = False
    """The last runner found no engine block that offers the model."""
    reason: str = ""
    """What kept the last runner from serving; empty: nothing."""

    @classmethod
    def of(cls, entry: ModelDemand) -> ModelWatch:
        """A new watch, with the model's counts at this moment."""
        return cls(entry.answered, _chunks(entry))

    def see(self, entry: ModelDemand) -> None:
        """Compare with the last counts: a model with new answers is not failing."""
        # A chunk takes its answers along when it is done.
        got_somewhere = entry.answered != self.answered or _chunks(entry) < self.chunks
        self.answered, self.chunks = entry.answered, _chunks(entry)
        if got_somewhere:
            self.failures = 0
            self.failing_since = None
            self.is_unknown = False
            self.reason = ""

    def count_end(self, run: FlowRun, runner: RunnerRecord | None, now: float) -> None:
        """Count the end of a runner that was not drained."""
        if runner is not None and runner.answered:
            self.idle_ends = 0
            return
        self.reason = _reason(run, runner)
        self.is_unknown = run.state_name == NO_ENGINE
        # Paced for the machine's sake: the answers of other machines change nothing about it.
        self._pause(now)
        if run.state_name not in _NEUTRAL and run.state != "CANCELLED":
            self.failures += 1
            if self.failing_since is None:
                self.failing_since = now
            self.failed_at = now

    def count_refusal(self, why: Exception, now: float) -> None:
        """Count a runner that Prefect did not start. Meanwhile other models may have the place."""
        self.reason = str(why)
        self._pause(now)

    def _pause(self, now: float) -> None:
        self.idle_ends += 1
        doublings = min(self.idle_ends - 1, _MOST_DOUBLINGS)
        self.start_after = now + min(2.0**doublings - 1.0, _LONGEST_PAUSE_SECONDS)

    def may_start(self, now: float) -> bool:
        """Whether a runner may be started. A clock that was set back ends the pause."""
        return not now < self.start_after <= now + _LONGEST_PAUSE_SECONDS

    def has_failed_for(self, seconds: float) -> bool:
        """Whether runners have failed for this long without an answer in between.

        Time after the last failure does not count. Nothing was tried in it: another model had the
        place, Prefect or the database was away, or the machine was suspended.
        """
        return self.failing_since is not None and self.failed_at - self.failing_since >= seconds

    def verdict(self, model: str) -> str:
        """The message for the model's batches, which fail because no machine can serve it."""
        minutes = (self.failed_at - (self.failing_since or self.failed_at)) / 60
        runners = "1 runner" if self.failures == 1 else f"{self.failures} runners"
        return (
            f"No machine could serve the model {model} for {minutes:.0f} min; {runners} failed. "
            f"The last one: {self.reason}"
        )


def _reason(run: FlowRun, runner: RunnerRecord | None) -> str:
    where = ""
    if run.state == "CRASHED" and runner is not None and runner.machine:
        # Those that end by themselves say where they were.
        where = f"on {runner.machine.partition('@')[0]}: "
    if run.state == "COMPLETED" and run.state_name not in _NEUTRAL:
        return (
            f"{where}it ended without an answer ({run.message or 'no message'}). "
            "Do the workers of the GPU pool use the database of this batch?"
        )
    return f"{where}{run.message or f'flow run {run.id} is {run.state.lower()}'}"


def _chunks(entry: ModelDemand) -> int:
    return entry.free_chunks + entry.leased_chunks
