"""The table of moves, every pair of it."""

from __future__ import annotations

from itertools import product

import pytest

from batchyard.errors import IllegalTransition
from batchyard.lifecycle import TERMINAL, TRANSITIONS, BatchStatus, check_transition, mermaid

# Written out by hand from the reference, as a second opinion on the table.
ALLOWED = {
    ("validating", "in_progress"),
    ("validating", "failed"),
    ("validating", "cancelling"),
    ("validating", "expired"),
    ("in_progress", "finalizing"),
    ("in_progress", "cancelling"),
    ("in_progress", "failed"),
    ("finalizing", "completed"),
    ("finalizing", "expired"),
    ("finalizing", "failed"),
    ("cancelling", "cancelled"),
}


@pytest.mark.parametrize(
    ("current", "target"),
    [pytest.param(*pair, id="-".join(pair)) for pair in product(BatchStatus, repeat=2)],
)
def test_a_move_is_allowed_exactly_where_the_reference_has_it(
    current: BatchStatus, target: BatchStatus
) -> None:
    if (current, target) in ALLOWED:
        check_transition(current, target)
    else:
        with pytest.raises(IllegalTransition, match=f"{current} cannot become {target}"):
            check_transition(current, target)


def test_there_are_64_pairs_of_statuses() -> None:
    assert len(list(product(BatchStatus, repeat=2))) == 64


def test_nothing_leaves_a_terminal_status() -> None:
    assert {"completed", "failed", "expired", "cancelled"} == TERMINAL
    assert all(not TRANSITIONS[status] for status in TERMINAL)


def test_every_status_can_be_reached_and_can_reach_an_end() -> None:
    reached = {BatchStatus.VALIDATING}.union(*TRANSITIONS.values())
    assert reached == set(BatchStatus)
    assert all(_ends(status) for status in BatchStatus)


def test_no_status_can_be_entered_twice() -> None:
    """Which is why a timestamp that is set on entry is set once."""
    assert not any(status in _after(status) for status in BatchStatus)


def test_every_status_but_the_first_has_a_timestamp() -> None:
    assert BatchStatus.VALIDATING.timestamp_field is None
    assert BatchStatus.CANCELLING.timestamp_field == "cancelling_at"


def test_the_diagram_draws_every_move() -> None:
    drawn = mermaid()
    assert all(f"    {current} --> {target}" in drawn for current, target in ALLOWED)
    assert drawn.count("-->") == len(ALLOWED) + 1 + len(TERMINAL)


def _after(status: BatchStatus) -> set[BatchStatus]:
    found: set[BatchStatus] = set()
    ahead = list(TRANSITIONS[status])
    while ahead:
        target = ahead.pop()
        if target not in found:
            found.add(target)
            ahead += TRANSITIONS[target]
    return found


def _ends(status: BatchStatus) -> bool:
    return status in TERMINAL or bool(_after(status) & TERMINAL)
