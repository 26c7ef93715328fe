"""What the ends of runners mean for their model."""

from __future__ import annotations

import pytest

from batchyard.dispatch.model_watch import ModelWatch
from batchyard.dispatch.prefect_answers import FlowRun
from batchyard.dispatch.run_states import NO_ENGINE, PUT_OFF, STOPPED
from batchyard.store import ModelDemand, RunnerKind, RunnerRecord, RunnerStatus

NOW = 1000.0


def demand(*, answered: int = 0, chunks: int = 4) -> ModelDemand:
    return ModelDemand(
        model="qwen",
        free_chunks=chunks,
        leased_chunks=0,
        remaining_tokens=1.0,
        answered=answered,
        deadline=NOW + 60,
    )


def ended(state: str = "FAILED", name: str = "", message: str = "no GPU") -> FlowRun:
    return FlowRun("r1", state, state_name=name, message=message)


def runner(answered: int) -> RunnerRecord:
    return RunnerRecord(
        id="runner_1",
        kind=RunnerKind.CHUNKS,
        model="qwen",
        pool="gpu",
        flow_run_id="r1",
        started_at=0.0,
        ready_at=None,
        heartbeat_at=0.0,
        status=RunnerStatus.LOST,
        machine="gpu-c@0123",
        failure=None,
        answered=answered,
    )


def test_runners_that_get_nowhere_are_started_ever_more_slowly() -> None:
    watch = ModelWatch.of(demand())
    pauses = []
    for _ in range(9):
        watch.count_end(ended(), None, NOW)
        pauses.append(watch.start_after - NOW)
    assert pauses == [0, 1, 3, 7, 15, 31, 60, 60, 60]


def test_runners_may_get_nowhere_for_days() -> None:
    watch = ModelWatch.of(demand())
    for _ in range(3000):
        watch.count_end(ended("COMPLETED", PUT_OFF), None, NOW)
    assert watch.start_after == NOW + 60


def test_a_runner_may_start_when_its_pause_is_over() -> None:
    watch = ModelWatch.of(demand())
    assert watch.may_start(NOW)
    for _ in range(3):
        watch.count_end(ended(), None, NOW)
    assert not watch.may_start(NOW)
    assert not watch.may_start(NOW + 2.9)
    assert watch.may_start(NOW + 3)


def test_a_clock_that_is_set_back_ends_the_pause() -> None:
    """It would last until the clock has caught up."""
    watch = ModelWatch.of(demand())
    for _ in range(9):
        watch.count_end(ended(), None, NOW)
    assert not watch.may_start(NOW)
    assert watch.may_start(NOW - 900)


def test_a_runner_that_is_stopped_while_it_loads_does_not_count_against_its_model() -> None:
    """However often: its batches wait, and say why, as a job's time limit may be too short."""
    watch = ModelWatch.of(demand())
    for _ in range(9):
        watch.count_end(ended("COMPLETED", STOPPED, "told to stop"), runner(answered=0), NOW)
    assert not watch.has_failed_for(0)
    assert (watch.start_after, watch.failures, watch.reason) == (NOW + 60, 0, "told to stop")


def test_a_runner_that_was_stopped_after_it_has_answered_is_followed_by_the_next_at_once() -> None:
    watch = ModelWatch.of(demand())
    for _ in range(9):
        watch.count_end(ended("COMPLETED", STOPPED), runner(answered=1), NOW)
    assert (watch.start_after, watch.reason) == (0.0, "")


def test_a_runner_that_answered_is_followed_by_the_next_at_once() -> None:
    watch = ModelWatch.of(demand())
    for _ in range(9):
        watch.count_end(ended("CRASHED"), runner(answered=1), NOW)
    assert (watch.start_after, watch.failing_since, watch.reason) == (0.0, None, "")


def test_the_answers_of_other_machines_do_not_hurry_one_that_fails() -> None:
    watch = ModelWatch.of(demand())
    for answered in range(1, 4):
        watch.count_end(ended(), None, NOW)
        watch.see(demand(answered=answered))
    assert watch.start_after == NOW + 3


def test_the_time_of_failing_counts_from_the_first_failure_since_the_last_answer() -> None:
    watch = ModelWatch.of(demand())
    watch.count_end(ended(), None, NOW)
    watch.see(demand(answered=1))
    watch.count_end(ended(), None, NOW + 500)
    watch.count_end(ended(), None, NOW + 799)
    assert not watch.has_failed_for(300)
    watch.count_end(ended(), None, NOW + 800)
    assert watch.has_failed_for(300)
    assert "for 5 min; 3 runners failed" in watch.verdict("qwen")


def test_a_chunk_that_was_done_at_once_counts_as_an_answer() -> None:
    watch = ModelWatch.of(demand(chunks=4))
    watch.count_end(ended(), None, NOW)
    watch.see(demand(chunks=3))
    assert watch.failing_since is None


@pytest.mark.parametrize(("state", "name"), [("COMPLETED", PUT_OFF), ("CANCELLED", "Cancelled")])
def test_what_is_not_the_models_fault_is_paced_and_not_counted(state: str, name: str) -> None:
    watch = ModelWatch.of(demand())
    for _ in range(3):
        watch.count_end(ended(state, name), None, NOW)
    assert (watch.failures, watch.start_after) == (0, NOW + 3)


def test_a_model_whose_block_is_found_again_is_not_unknown() -> None:
    watch = ModelWatch.of(demand())
    watch.count_end(ended("COMPLETED", NO_ENGINE), None, NOW)
    watch.count_end(ended(), None, NOW)
    assert not watch.is_unknown


def test_a_runner_that_found_nothing_to_do_may_have_looked_in_another_database() -> None:
    watch = ModelWatch.of(demand())
    watch.count_end(ended("COMPLETED", message="0 requests answered"), None, NOW)
    assert watch.failures == 1
    assert "use the database of this batch" in watch.reason


def test_the_verdict_names_the_time_the_runners_and_the_last_reason() -> None:
    watch = ModelWatch.of(demand())
    watch.count_end(ended(), None, NOW)
    watch.count_end(ended("CRASHED", message="killed"), runner(answered=0), NOW + 900)
    assert watch.verdict("qwen") == (
        "No machine could serve the model qwen for 15 min; 2 runners failed. "
        "The last one: on gpu-c: killed"
    )
