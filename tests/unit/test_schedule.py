"""Which runners are started and drained: the limits, the order, and what happens over time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.schedule.schedule import (
    RUNNERS_PER_MODEL,
    ActiveRunner,
    Decision,
    ModelWork,
    Rate,
    plan_runners,
    wanted_runners,
)

NOW = 10_000.0
SWAP_SECONDS = 300.0


def work(model: str, **changes: Any) -> ModelWork:
    values: dict[str, Any] = {
        "pool": "gpu",
        "free_chunks": 1,
        "leased_chunks": 0,
        "remaining_tokens": 1000,
        "deadline": NOW + 3600,
    }
    return ModelWork(model=model, **(values | changes))


def runner(model: str, runner_id: str | None = None, **changes: Any) -> ActiveRunner:
    """One that has been ready for long, unless told otherwise."""
    values: dict[str, Any] = {"pool": "gpu", "started_at": 0.0, "ready_at": 100.0}
    return ActiveRunner(model=model, runner_id=runner_id, **(values | changes))


def plan(
    limit: int | None,
    demand: list[ModelWork],
    runners: list[ActiveRunner] | None = None,
    rates: dict[tuple[str, str], Rate] | None = None,
) -> Decision:
    return plan_runners(
        {"gpu": limit}, demand, runners or [], rates or {}, now=NOW, swap_seconds=SWAP_SECONDS
    )


# -- starting -----------------------------------------------------------------------------------


def test_without_work_nothing_happens() -> None:
    assert plan(2, [], [runner("a", "r1")]) == Decision()


def test_the_most_urgent_model_gets_the_only_place() -> None:
    demand = [work("late", deadline=NOW + 9), work("soon", deadline=NOW + 5)]
    assert plan(1, demand).start == [("soon", "gpu")]


def test_every_model_has_a_runner_before_any_has_a_second() -> None:
    demand = [work("soon", free_chunks=20, deadline=NOW + 5), work("late")]
    assert plan(3, demand).start == [("soon", "gpu"), ("late", "gpu"), ("soon", "gpu")]


def test_further_runners_go_where_there_are_fewest_then_to_the_most_urgent() -> None:
    demand = [work("a", free_chunks=20), work("b", free_chunks=20, deadline=NOW + 5)]
    assert plan(5, demand, [runner("b"), runner("a"), runner("b")]).start == [
        ("a", "gpu"),
        ("b", "gpu"),
    ]


def test_a_flow_run_on_its_way_is_not_started_again() -> None:
    assert plan(2, [work("a")], [runner("a", ready_at=None)]) == Decision()


def test_a_draining_runner_keeps_its_place_and_serves_nobody() -> None:
    leaving = runner("a", "r1", is_draining=True)
    assert plan(1, [work("a")], [leaving]) == Decision()
    assert plan(2, [work("a")], [leaving]).start == [("a", "gpu")]


def test_pools_do_not_share_places() -> None:
    demand = [work("a"), work("b", pool="big"), work("c", pool="unknown")]
    decision = plan_runners(
        {"gpu": 1, "big": 1}, demand, [runner("x", "r1")], {}, now=NOW, swap_seconds=SWAP_SECONDS
    )
    assert decision == Decision(start=[("b", "big")], drain=["r1"])


def test_a_pool_without_a_limit_has_one_of_ours_for_each_model() -> None:
    demand = [work("a", free_chunks=1000), work("b")]
    started = Counter(model for model, _ in plan(None, demand).start)
    assert started == {"a": RUNNERS_PER_MODEL, "b": 1}


@pytest.mark.parametrize(
    ("rate", "changes", "wanted"),
    [
        (None, {"free_chunks": 1}, 1),
        (None, {"free_chunks": 4, "leased_chunks": 3}, 4),
        (Rate(load_seconds=30.0), {"free_chunks": 6}, 3),
        (Rate(tokens_per_second=10.0), {"free_chunks": 9, "remaining_tokens": 600}, 1),
        (Rate(tokens_per_second=10.0), {"free_chunks": 9, "remaining_tokens": 601}, 2),
        (
            Rate(tokens_per_second=10.0, load_seconds=100.0),
            {"free_chunks": 9, "remaining_tokens": 6000},
            3,
        ),
        (Rate(tokens_per_second=1.0), {"free_chunks": 2, "remaining_tokens": 10**9}, 2),
        (Rate(tokens_per_second=10.0), {"remaining_tokens": 0}, 1),
    ],
)
def test_a_model_gets_as_many_runners_as_its_work_deserves(
    rate: Rate | None, changes: dict[str, int], wanted: int
) -> None:
    assert wanted_runners(work("a", **changes), rate) == wanted


def test_nobody_is_added_where_every_chunk_has_an_owner() -> None:
    assert plan(4, [work("a", free_chunks=0, leased_chunks=9)], [runner("a", "r1")]) == Decision()


# -- draining -----------------------------------------------------------------------------------


def test_one_without_work_goes_first_even_while_it_loads() -> None:
    runners = [runner("a", "r1"), runner("a", "r2"), runner("idle", "r3", ready_at=None)]
    assert plan(3, [work("a"), work("b")], runners).drain == ["r3"]


def test_then_one_of_a_model_that_has_several() -> None:
    runners = [
        runner("a", "r1", ready_at=1.0),
        runner("b", "r2", ready_at=50.0),
        runner("b", "r3", ready_at=40.0),
    ]
    assert plan(3, [work("a"), work("b"), work("c")], runners).drain == ["r3"]


def test_then_the_one_that_has_served_longest() -> None:
    runners = [runner("a", "r1", ready_at=60.0), runner("b", "r2", ready_at=50.0)]
    assert plan(2, [work("a"), work("b"), work("c")], runners).drain == ["r2"]


@pytest.mark.parametrize("ready_at", [None, NOW - SWAP_SECONDS + 1])
def test_one_that_loads_or_has_just_loaded_is_let_serve(ready_at: float | None) -> None:
    assert plan(1, [work("a"), work("b")], [runner("a", "r1", ready_at=ready_at)]) == Decision()


def test_one_drain_for_each_model_that_waits() -> None:
    runners = [runner("a", f"r{n}") for n in range(4)]
    demand = [work("a"), work("b"), work("c")]
    assert plan(4, demand, runners).drain == ["r0", "r1"]
    runners[0] = replace(runners[0], is_draining=True)
    assert plan(4, demand, runners).drain == ["r1"]
    runners[1] = replace(runners[1], is_draining=True)
    assert plan(4, demand, runners) == Decision()


def test_a_flow_run_that_has_no_runner_yet_cannot_be_drained() -> None:
    assert plan(1, [work("b")], [runner("idle", None, ready_at=None)]) == Decision()


def test_nothing_is_drained_where_there_is_room() -> None:
    assert plan(2, [work("b")], [runner("idle", "r1")]).drain == []


def test_what_was_swapped_out_does_not_take_its_place_back() -> None:
    demand = [work("a", deadline=NOW + 5, served_at=NOW - 1), work("b")]
    assert plan(1, demand).start == [("b", "gpu")]


def test_what_was_swapped_out_takes_no_other_place_before_the_others_have_served() -> None:
    runners = [runner("b", "r1"), runner("c", "r2")]
    demand = [work("a", served_at=NOW - 10), work("b"), work("c")]
    assert plan(2, demand, runners).drain == []
    demand[0] = work("a", served_at=NOW - SWAP_SECONDS)
    assert plan(2, demand, runners).drain == ["r1"]
    demand[0] = work("a", served_at=NOW - 10)
    assert plan(3, demand, [*runners, runner("idle", "r3")]).drain == ["r3"]


def test_a_pool_that_was_made_smaller_still_swaps() -> None:
    runners = [runner("a", "r1"), runner("b", "r2")]
    demand = [work("a"), work("b"), work("c")]
    assert plan(1, demand, runners).drain == ["r1"]
    assert plan(0, demand, runners).drain == []


# -- always -------------------------------------------------------------------------------------

models = st.sampled_from("abcde")
works = st.lists(
    st.builds(
        ModelWork,
        model=models,
        pool=st.just("gpu"),
        free_chunks=st.integers(0, 30),
        leased_chunks=st.integers(0, 5),
        remaining_tokens=st.integers(0, 10**7),
        deadline=st.floats(NOW - 100, NOW + 10**5),
        served_at=st.none() | st.floats(0, NOW),
    ),
    unique_by=lambda entry: entry.model,
)
active = st.lists(
    st.builds(
        ActiveRunner,
        model=models,
        pool=st.just("gpu"),
        runner_id=st.none() | st.uuids().map(str),
        is_draining=st.booleans(),
        started_at=st.floats(0, NOW),
        ready_at=st.none() | st.floats(0, NOW),
    ),
    max_size=6,
)
rates_of = st.dictionaries(
    models.map(lambda model: (model, "gpu")),
    st.builds(
        Rate,
        tokens_per_second=st.none() | st.floats(0, 10**5),
        load_seconds=st.none() | st.floats(0, 600),
    ),
)


@given(st.integers(0, 6), works, active, rates_of)
def test_no_pool_ever_passes_its_limit(
    limit: int,
    demand: list[ModelWork],
    runners: list[ActiveRunner],
    rates: dict[tuple[str, str], Rate],
) -> None:
    started = plan(limit, demand, runners, rates).start
    assert not started or len(runners) + len(started) <= limit


@given(st.none() | st.integers(0, 6), works, active, rates_of, st.randoms())
def test_the_order_in_which_things_are_seen_changes_nothing(
    limit: int | None,
    demand: list[ModelWork],
    runners: list[ActiveRunner],
    rates: dict[tuple[str, str], Rate],
    random: Any,
) -> None:
    decided = plan(limit, demand, runners, rates)
    random.shuffle(demand)
    random.shuffle(runners)
    assert plan(limit, demand, runners, rates) == decided


@given(st.none() | st.integers(0, 6), works, active, rates_of)
def test_once_carried_out_it_asks_for_nothing_more(
    limit: int | None,
    demand: list[ModelWork],
    runners: list[ActiveRunner],
    rates: dict[tuple[str, str], Rate],
) -> None:
    decided = plan(limit, demand, runners, rates)
    after = [
        replace(one, is_draining=one.is_draining or one.runner_id in decided.drain)
        for one in runners
    ]
    after += [ActiveRunner(model=model, pool=pool) for model, pool in decided.start]
    assert plan(limit, demand, after, rates) == Decision()


# -- over time ----------------------------------------------------------------------------------


@dataclass
class Yard:
    """A pool whose engines take ``load_seconds`` to load, looked at every ``step`` seconds."""

    limit: int
    load_seconds: float
    step: float = 10.0
    now: float = 0.0
    runners: dict[str, ActiveRunner] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    worked: Counter[str] = field(default_factory=Counter)
    drains: list[float] = field(default_factory=list)
    starts: int = 0

    def look(self, demand: list[ModelWork]) -> None:
        for one in self.runners.values():
            self.served[one.model] = self.now
        demand = [replace(entry, served_at=self.served.get(entry.model)) for entry in demand]
        decided = plan_runners(
            {"gpu": self.limit},
            demand,
            list(self.runners.values()),
            {},
            now=self.now,
            swap_seconds=SWAP_SECONDS,
        )
        self.runners = {name: one for name, one in self.runners.items() if not one.is_draining}
        for name in decided.drain:
            self.runners[name] = replace(self.runners[name], is_draining=True)
            self.drains.append(self.now)
        for model, pool in decided.start:
            self.starts += 1
            name = f"r{self.starts}"
            self.runners[name] = ActiveRunner(
                model=model, pool=pool, runner_id=name, started_at=self.now
            )
        assert len(self.runners) <= self.limit
        self.pass_time()

    def pass_time(self) -> None:
        self.now += self.step
        for name, one in self.runners.items():
            if one.ready_at is not None:
                self.worked[one.model] += 1
            elif self.now - one.started_at >= self.load_seconds:
                self.runners[name] = replace(one, ready_at=self.now)


@given(st.floats(0, 200), st.lists(st.floats(0, 1000), min_size=2, max_size=2))
def test_two_models_share_one_place_and_swap_now_and_then(
    load_seconds: float, deadlines: list[float]
) -> None:
    yard = Yard(limit=1, load_seconds=load_seconds)
    demand = [
        work(model, deadline=due, free_chunks=9) for model, due in zip("ab", deadlines, strict=True)
    ]
    for _ in range(300):
        yard.look(demand)
    pauses = [after - before for before, after in zip(yard.drains, yard.drains[1:], strict=False)]
    assert len(yard.drains) >= 4
    assert min(pauses) >= SWAP_SECONDS
    assert min(yard.worked["a"], yard.worked["b"]) >= 0.4 * sum(yard.worked.values())


@given(st.integers(1, 3), st.integers(2, 6), st.floats(0, 60))
def test_no_model_with_work_starves(limit: int, count: int, load_seconds: float) -> None:
    yard = Yard(limit=limit, load_seconds=load_seconds)
    demand = [work(f"m{n}", deadline=float(n), free_chunks=9) for n in range(count)]
    for _ in range(60 * count):
        yard.look(demand)
    assert set(yard.worked) == {f"m{n}" for n in range(count)}
    fair = sum(yard.worked.values()) / count
    assert min(yard.worked.values()) >= fair / 3


def test_what_does_not_change_is_left_as_it_is() -> None:
    yard = Yard(limit=4, load_seconds=20.0)
    demand = [work("a", free_chunks=9), work("b", free_chunks=9)]
    for _ in range(200):
        yard.look(demand)
    assert (yard.starts, yard.drains) == (4, [])


def test_an_idle_runner_stays_where_one_that_leaves_already_makes_room() -> None:
    runners = [runner("gone", "r1", is_draining=True), runner("idle", "r2")]
    assert plan(2, [work("a")], runners) == Decision()
    assert plan(2, [work("a"), work("b")], runners).drain == ["r2"]


def test_a_working_runner_stays_where_one_that_leaves_makes_room_for_all_who_are_entitled() -> None:
    """The other one that waits has had its turn a moment ago."""
    demand = [work("a"), work("b", served_at=NOW - 10), work("c")]
    runners = [runner("gone", "r1", is_draining=True), runner("c", "r2")]
    assert plan(2, demand, runners) == Decision()


# -- background work --------------------------------------------------------------------------


def background(model: str, **changes: Any) -> ModelWork:
    return work(model, is_background=True, **changes)


def test_background_work_gets_the_places_that_nobody_else_wants() -> None:
    demand = [background("idle", deadline=NOW), work("a", free_chunks=4)]
    assert plan(2, demand).start == [("a", "gpu"), ("a", "gpu")]
    assert plan(3, demand).start == [("a", "gpu"), ("a", "gpu"), ("idle", "gpu")]


def test_background_work_leaves_at_once_for_the_first_runner_of_another_model() -> None:
    """However short it has served, or while it loads; and however short the other has waited."""
    demand = [background("idle", free_chunks=9), work("new", served_at=NOW - 1)]
    for ready_at in (100.0, NOW - 1, None):
        runners = [runner("idle", "r1", ready_at=ready_at)]
        assert plan(1, demand, runners) == Decision(drain=["r1"])


def test_background_work_leaves_for_a_further_runner_that_another_model_deserves() -> None:
    demand = [background("idle", free_chunks=9), work("a", free_chunks=4)]
    runners = [runner("a", "r1"), runner("idle", "r2"), runner("idle", "r3")]
    assert plan(3, demand, runners) == Decision(drain=["r2"])


def test_background_work_takes_no_place_of_other_work() -> None:
    """Not even of a runner that has served for long; of one without work it does."""
    demand = [background("idle"), work("a")]
    assert plan(1, demand, [runner("a", "r1")]) == Decision()
    assert plan(1, [background("idle")], [runner("a", "r1")]) == Decision(drain=["r1"])


def test_background_models_swap_as_others_do_among_themselves() -> None:
    demand = [background("old"), background("new")]
    assert plan(1, demand, [runner("old", "r1")]) == Decision(drain=["r1"])
    assert plan(1, demand, [runner("old", "r1", ready_at=NOW - 1)]) == Decision()


def test_a_place_that_is_being_left_is_not_made_twice() -> None:
    demand = [background("idle", free_chunks=9), work("new")]
    runners = [runner("idle", "r1", is_draining=True), runner("idle", "r2")]
    assert plan(2, demand, runners) == Decision()


# -- live models --------------------------------------------------------------------------------


def live(model: str) -> ModelWork:
    """Without chunks."""
    return work(model, free_chunks=0, remaining_tokens=0, is_live=True)


def test_a_live_model_gets_a_runner_without_chunks_and_no_second_one() -> None:
    assert plan(4, [live("a")]).start == [("a", "gpu")]
    assert plan(4, [live("a")], [runner("a", "r1")]) == Decision()


def test_the_last_runner_of_a_live_model_keeps_its_place() -> None:
    """Batches of other models wait, for who calls from outside cannot."""
    assert plan(1, [live("a"), work("b")], [runner("a", "r1")]) == Decision()
    two = [runner("a", "r1"), runner("a", "r2")]
    assert len(plan(2, [live("a"), work("b")], two).drain) == 1


def test_a_runner_that_waits_for_live_requests_that_are_not_wanted_is_drained() -> None:
    """Also in a pool without a limit, where nothing makes room for anything."""
    waiting = [runner("a", "r1", waits_for_live=True), runner("b", "r2")]
    assert plan(None, [], waiting).drain == ["r1"]
    assert plan(2, [work("a")], waiting).drain == []
