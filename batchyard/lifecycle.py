"""The eight statuses of a batch and the moves between them. One table, nothing else.

Source: conformance to the OpenAI Batch API's state machine. ``docs/architecture.md`` holds
the diagram that :func:`mermaid` draws from ``TRANSITIONS``.
"""

from __future__ import annotations

from enum import StrEnum

from batchyard.errors import IllegalTransition


class BatchStatus(StrEnum):
    """Each status: how a batch gets in and how it gets out; process-batch moves it on."""

    VALIDATING = "validating"
    """In: created. Out: the input is good, refused, cancelled or overdue."""
    IN_PROGRESS = "in_progress"
    """In: planned. Out: every line answered, cancelled, overdue, or it cannot be run."""
    FINALIZING = "finalizing"
    """In: nothing more will run. Out: the result files are published."""
    CANCELLING = "cancelling"
    """In: the user asked. Out: in-flight work is aborted, partial files published."""
    COMPLETED = "completed"
    """In: every line has its answer, good or bad. Terminal."""
    FAILED = "failed"
    """In: the input was refused, or the batch cannot be run. Never: lines failed. Terminal."""
    EXPIRED = "expired"
    """In: the completion window ended first; finished lines are kept. Terminal."""
    CANCELLED = "cancelled"
    """In: the cancellation is complete; finished lines are kept. Terminal."""

    @property
    def timestamp_field(self) -> str | None:
        """The column that is set, once, on entering this status; ``created_at`` marks the first."""
        return None if self is BatchStatus.VALIDATING else f"{self.value}_at"


_S = BatchStatus

TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.IN_PROGRESS, _S.FAILED, _S.CANCELLING, _S.EXPIRED}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.CANCELLING, _S.FAILED}),
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.EXPIRED, _S.FAILED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}

TERMINAL: frozenset[BatchStatus] = frozenset(
    status for status, targets in TRANSITIONS.items() if not targets
)
UNFINISHED: frozenset[BatchStatus] = frozenset(BatchStatus) - TERMINAL
STOPPABLE: frozenset[BatchStatus] = frozenset({_S.VALIDATING, _S.IN_PROGRESS})
"""While it waits or runs; afterwards only its files are made."""


def check_transition(current: BatchStatus, target: BatchStatus) -> None:
    """Raise :class:`IllegalTransition` unless ``current`` may become ``target``."""
    if target not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(TRANSITIONS[current])) or "nothing: it is terminal"
        raise IllegalTransition(
            f"A batch that is {current.value} cannot become {target.value} (allowed: {allowed})."
        )


def mermaid() -> str:
    """The table as a Mermaid state diagram, for ``docs/architecture.md``."""
    lines = ["stateDiagram-v2", f"    [*] --> {BatchStatus.VALIDATING.value}"]
    for status, targets in TRANSITIONS.items():
        ordered = [target for target in BatchStatus if target in targets]
        lines += [f"    {status.value} --> {target.value}" for target in ordered]
        if status in TERMINAL:
            lines.append(f"    {status.value} --> [*]")
    return "\n".join(lines)
