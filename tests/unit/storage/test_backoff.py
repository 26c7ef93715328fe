"""Bounded, doubling, jittered waits."""

from __future__ import annotations

import pytest

from batchyard.errors import AccessDenied, StorageUnavailable
from batchyard.storage.backoff import Backoff

QUICK = Backoff(attempts=3, first_seconds=0.001)


def test_waits_double_up_to_the_longest() -> None:
    """Each wait is between half and the whole of its step."""
    waits = list(Backoff(attempts=6, first_seconds=1.0, longest_seconds=5.0).waits())

    assert len(waits) == 5
    for wait, whole in zip(waits, [1.0, 2.0, 4.0, 5.0, 5.0], strict=True):
        assert whole / 2 <= wait <= whole


def test_those_who_failed_together_do_not_try_again_together() -> None:
    first_waits = {next(Backoff().waits()) for _ in range(20)}
    assert len(first_waits) > 1


async def test_a_call_that_recovers_gives_its_result() -> None:
    """Failures before the last try do not show."""
    outcomes = [StorageUnavailable("a"), StorageUnavailable("b"), "done"]

    async def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    assert await QUICK.retry(attempt) == "done"


@pytest.mark.parametrize(("error", "tries"), [(StorageUnavailable, 3), (AccessDenied, 1)])
async def test_only_what_may_pass_is_tried_again(error: type[Exception], tries: int) -> None:
    """StorageUnavailable up to the last try, anything else once."""
    count = 0

    async def attempt() -> None:
        nonlocal count
        count += 1
        raise error("no")

    with pytest.raises(error):
        await QUICK.retry(attempt)
    assert count == tries
