"""How a chunk runs after strikes and deaths; see ADR 20."""

from __future__ import annotations

from batchyard.runner.chunk.suspects import given_up_of, group_size_of, level_of, runs_alone
from batchyard.store import ChunkLease


def lease(*, strikes: int = 0, deaths: int = 0) -> ChunkLease:
    return ChunkLease(
        batch_id="b",
        index=0,
        epoch=1,
        owner="o",
        model="m",
        deadline=0,
        first_record=0,
        request_count=1000,
        token_estimate=1,
        strikes=strikes,
        deaths=deaths,
    )


def test_the_first_death_of_a_machine_changes_nothing() -> None:
    for deaths in (0, 1):
        assert not runs_alone(lease(deaths=deaths))
        assert group_size_of(lease(deaths=deaths)) is None


def test_a_chunk_that_was_held_at_two_deaths_in_a_row_runs_alone() -> None:
    assert runs_alone(lease(deaths=2))
    assert group_size_of(lease(deaths=2)) is None


def test_errors_in_the_chunk_never_empty_a_runner() -> None:
    assert not any(runs_alone(lease(strikes=strikes)) for strikes in range(12))


def test_the_company_gets_smaller_until_a_request_is_alone() -> None:
    assert [group_size_of(lease(deaths=deaths)) for deaths in range(3, 8)] == [64, 8, 1, 1, 1]
    assert [group_size_of(lease(strikes=strikes)) for strikes in range(1, 6)] == [None, 64, 8, 1, 1]


def test_a_request_is_given_up_after_two_deaths_at_which_it_was_alone() -> None:
    given_up = [given_up_of(lease(deaths=deaths), 1000) for deaths in range(12)]
    assert given_up == [0, 0, 0, 0, 0, 0, 0, 1, 8, 64, 1000, 1000]


def test_never_more_is_given_up_than_is_left() -> None:
    assert [given_up_of(lease(strikes=strikes), 5) for strikes in range(6, 11)] == [1, 5, 5, 5, 5]


def test_strikes_and_deaths_are_not_added_up() -> None:
    assert level_of(lease(strikes=3, deaths=4)) == 3
