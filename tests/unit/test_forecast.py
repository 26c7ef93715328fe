"""The forecast: fluid, fair, and never wrong about the sum."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.schedule.forecast import Capacity, OpenWork, forecast
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.schedule.turns import URGENCY_SECONDS, urgency

NOW = 1_800_000_000
HOUR = 3600
DAY = 24 * HOUR

TEN_A_SECOND = {"qwen": Capacity(tokens_per_second=10, runners=1, loading_seconds=0)}


def work(
    batch_id: str,
    tokens: float,
    *,
    model: str = "qwen",
    tenant: str = "a",
    deadline: int = NOW + DAY,
    priority: int = 0,
    created_at: int = NOW,
    is_paused: bool = False,
    is_background: bool = False,
) -> OpenWork:
    return OpenWork(
        batch_id,
        model,
        tenant,
        deadline,
        priority,
        created_at,
        tokens,
        is_paused=is_paused,
        is_background=is_background,
    )


def seconds_until_done(
    items: list[OpenWork], capacity: dict[str, Capacity] | None = None
) -> dict[str, int]:
    done = forecast(items, TEN_A_SECOND if capacity is None else capacity, NOW)
    return {batch_id: eta - NOW for batch_id, eta in done.items()}


def test_one_batch_takes_its_tokens_over_the_rate_of_all_runners() -> None:
    capacity = {"qwen": Capacity(tokens_per_second=10, runners=2, loading_seconds=30)}
    assert seconds_until_done([work("x", 1000)], capacity) == {"x": 80}


def test_of_one_tenant_higher_priority_goes_first_then_the_deadline_then_age() -> None:
    items = [
        work("younger", 100),
        work("older", 100, created_at=NOW - 1),
        work("due", 100, deadline=NOW + DAY - 1),
        work("urgent", 100, priority=1),
    ]
    assert seconds_until_done(items) == {"urgent": 10, "due": 20, "older": 30, "younger": 40}


def test_tenants_share_equally_however_many_batches_they_have() -> None:
    items = [work("b", 100, tenant="b"), *(work(f"a{n}", 100) for n in range(3))]
    assert seconds_until_done(items) == {"a0": 20, "b": 20, "a1": 30, "a2": 40}


def test_the_more_urgent_class_goes_first_whoever_owns_it() -> None:
    items = [
        work("today", 100, tenant="b", priority=9),
        work("soon", 100, deadline=NOW + HOUR),
        work("sooner", 100, tenant="b", deadline=NOW + HOUR // 2),
    ]
    assert seconds_until_done(items) == {"soon": 20, "sooner": 20, "today": 30}


def test_background_batches_come_last_however_near_their_end_or_high_their_priority() -> None:
    items = [
        work("gap", 100, deadline=NOW + 60, priority=9, is_background=True),
        work("other gap", 100, tenant="b", is_background=True),
        work("late", 100, deadline=NOW + 7 * DAY),
        work("later", 100, tenant="b", deadline=NOW + 7 * DAY),
    ]
    assert seconds_until_done(items) == {"late": 20, "later": 20, "gap": 40, "other gap": 40}


def test_work_waits_for_the_hours_of_its_engine_and_for_the_next_ones() -> None:
    """NOW is 08:00 UTC. The model loads in the hours as well."""
    hours = Hours((HoursWindow("0 9 * * *", duration="1h"),))
    capacity = {"qwen": Capacity(10, 1, loading_seconds=600, hours=hours)}
    items = [work("today", 10 * 3000), work("tomorrow", 1000, priority=-1)]
    assert seconds_until_done(items, capacity) == {
        "today": HOUR + 3600,
        "tomorrow": HOUR + DAY + 100,
    }


def test_an_hour_in_which_nothing_runs_makes_batches_urgent_all_the_same() -> None:
    """When the engine opens, less than an hour is left of the one that would have been second."""
    hours = Hours((HoursWindow("0 9 * * *", duration="5h"),))
    capacity = {"qwen": Capacity(10, 1, hours=hours)}
    items = [
        work("first", 1000, deadline=NOW + 5 * HOUR, priority=1),
        work("urgent", 1000, deadline=NOW + HOUR + 1800),
    ]
    assert seconds_until_done(items, capacity) == {"urgent": HOUR + 100, "first": HOUR + 200}


def test_work_that_no_hours_in_sight_suffice_for_has_no_forecast() -> None:
    capacity = {"qwen": Capacity(10, 1, hours=Hours((HoursWindow("0 9 * * *", duration="1s"),)))}
    assert seconds_until_done([work("x", 10), work("y", 1e9)], capacity) == {"x": HOUR + 1}


def test_a_batch_overtakes_when_its_deadline_comes_near() -> None:
    """It waits behind a higher priority until an hour is left, then it has the rate alone."""
    items = [
        work("large", 10_000, deadline=NOW + 2 * HOUR, priority=1),
        work("small", 100, deadline=NOW + HOUR + 50),
    ]
    assert seconds_until_done(items) == {"small": 60, "large": 1010}


def test_the_boundaries_belong_to_the_more_urgent_class() -> None:
    for place, limit in enumerate(URGENCY_SECONDS):
        assert (urgency(limit), urgency(limit + 0.001)) == (place, place + 1)
    assert urgency(-1) == 0


def test_models_do_not_wait_for_each_other() -> None:
    capacity = {**TEN_A_SECOND, "llama": Capacity(1, 1, 0)}
    items = [work("x", 100), work("y", 100, model="llama")]
    assert seconds_until_done(items, capacity) == {"x": 10, "y": 100}


def test_a_batch_of_several_models_is_done_when_the_last_of_them_is() -> None:
    items = [work("x", 100), work("x", 100, model="llama")]
    capacity = {**TEN_A_SECOND, "llama": Capacity(1, 1, 0)}
    assert seconds_until_done(items, capacity) == {"x": 100}
    assert seconds_until_done(items) == {}


def test_paused_batches_get_no_forecast_and_hold_nobody_up() -> None:
    assert seconds_until_done([work("x", 100, is_paused=True), work("y", 100)]) == {"y": 10}


@pytest.mark.parametrize(
    "capacity", [{}, {"qwen": Capacity(0, 1, 0)}, {"qwen": Capacity(10, 0, 0)}]
)
def test_a_model_without_a_known_rate_gets_no_forecast(capacity: dict[str, Capacity]) -> None:
    assert seconds_until_done([work("x", 100)], capacity) == {}


def test_a_batch_with_nothing_left_is_done_now() -> None:
    assert seconds_until_done([work("x", 0), work("y", 100, priority=1)]) == {"x": 0, "y": 10}


@pytest.mark.alone
def test_many_batches_take_no_longer_than_their_number_deserves() -> None:
    """Quadratic time would take minutes."""
    items = [
        work(f"{n}", 1 + n % 97, tenant=f"t{n % 500}", deadline=NOW + 17 * n % (2 * DAY))
        for n in range(20_000)
    ]
    began = time.perf_counter()
    assert len(seconds_until_done(items)) == 20_000
    assert time.perf_counter() - began < 10


# What must hold for any work. Deadlines lie close to the boundaries, so that batches become more
# urgent while they run.

_DEADLINES = st.one_of(
    st.sampled_from([NOW - 5, NOW + 2 * DAY]),
    st.builds(
        lambda limit, after: NOW + limit + after,
        st.sampled_from(URGENCY_SECONDS),
        st.integers(-20, 200),
    ),
)
_WORK = st.lists(
    st.builds(
        OpenWork,
        batch_id=st.uuids().map(str),
        model=st.just("qwen"),
        tenant=st.sampled_from("abc"),
        deadline=_DEADLINES,
        priority=st.integers(-1, 1),
        created_at=st.integers(NOW - 2, NOW),
        remaining_tokens=st.integers(1, 1000),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda item: item.batch_id,
)
_CAPACITY = st.builds(
    Capacity,
    tokens_per_second=st.sampled_from([0.5, 3, 10, 33.3]),
    runners=st.integers(1, 3),
    loading_seconds=st.sampled_from([0, 7.5, 120]),
)


def etas(items: list[OpenWork], capacity: Capacity) -> dict[str, int]:
    return forecast(items, {"qwen": capacity}, NOW)


@given(_WORK, _CAPACITY)
def test_the_last_batch_is_done_when_all_tokens_are(
    items: list[OpenWork], capacity: Capacity
) -> None:
    tokens = sum(item.remaining_tokens for item in items)
    seconds = capacity.loading_seconds + tokens / (capacity.tokens_per_second * capacity.runners)
    assert max(etas(items, capacity).values()) == pytest.approx(NOW + seconds, abs=1.01, rel=0)


@given(_WORK, _CAPACITY)
def test_the_forecast_is_the_fluid_model_step_by_step(
    items: list[OpenWork], capacity: Capacity
) -> None:
    expected = fluid(items, capacity)
    found = etas(items, capacity)
    assert found.keys() == expected.keys()
    for batch_id, eta in expected.items():
        assert found[batch_id] == pytest.approx(eta, abs=1.01, rel=0)


@given(_WORK, _CAPACITY)
def test_no_tenant_waits_for_more_than_its_share(items: list[OpenWork], capacity: Capacity) -> None:
    """Of equal urgency, a tenant alone with its batches is at most as many times faster as there
    are tenants."""
    items = [replace(item, deadline=NOW + 2 * DAY) for item in items]
    tenants = {item.tenant for item in items}
    shared = etas(items, capacity)
    for tenant in tenants:
        alone = etas([item for item in items if item.tenant == tenant], capacity)
        for batch_id, eta in alone.items():
            busy_seconds = eta - NOW - capacity.loading_seconds
            latest = NOW + capacity.loading_seconds + busy_seconds * len(tenants)
            assert shared[batch_id] <= latest + 1


@given(_WORK, _CAPACITY, st.integers(1, 3), st.sampled_from([0, 50]))
def test_more_capacity_never_delays(
    items: list[OpenWork], capacity: Capacity, more_runners: int, sooner_seconds: float
) -> None:
    more = Capacity(
        capacity.tokens_per_second,
        capacity.runners + more_runners,
        max(0, capacity.loading_seconds - sooner_seconds),
    )
    before, after = etas(items, capacity), etas(items, more)
    assert all(after[batch_id] <= eta for batch_id, eta in before.items())


@given(_WORK, _CAPACITY, st.integers(1, 500))
def test_a_batch_with_more_left_is_not_done_earlier(
    items: list[OpenWork], capacity: Capacity, more_tokens: int
) -> None:
    own, *others = items
    larger = replace(own, remaining_tokens=own.remaining_tokens + more_tokens)
    assert etas([larger, *others], capacity)[own.batch_id] >= etas(items, capacity)[own.batch_id]


@given(_WORK, _CAPACITY)
def test_the_order_of_the_work_does_not_matter(items: list[OpenWork], capacity: Capacity) -> None:
    assert etas(items[::-1], capacity) == pytest.approx(etas(items, capacity), abs=1.01, rel=0)


def fluid(items: list[OpenWork], capacity: Capacity) -> dict[str, int]:
    """The same world told plainly, in exact numbers: who is served from one event to the next."""
    rate = Fraction(capacity.tokens_per_second) * capacity.runners
    at = NOW + Fraction(capacity.loading_seconds)
    left = {item.batch_id: Fraction(item.remaining_tokens) for item in items}
    rises = [item.deadline - limit for item in items for limit in URGENCY_SECONDS]
    done: dict[str, int] = {}
    while left:
        heads = _served_at(at, [item for item in items if item.batch_id in left])
        share = rate / len(heads)
        shortest = min(left[item.batch_id] for item in heads)
        until = min([at + shortest / share, *(Fraction(rise) for rise in rises if rise > at)])
        for item in heads:
            left[item.batch_id] -= share * (until - at)
            if left[item.batch_id] == 0:
                del left[item.batch_id]
                done[item.batch_id] = math.ceil(until)
        at = until
    return done


def _served_at(at: Fraction, items: list[OpenWork]) -> list[OpenWork]:
    first = min(_class_of(item, at) for item in items)
    urgent = sorted(
        (item for item in items if _class_of(item, at) == first),
        key=lambda i: (i.tenant, -i.priority, i.deadline, i.created_at, i.batch_id),
    )
    return [next(group) for _, group in groupby(urgent, key=lambda item: item.tenant)]


def _class_of(item: OpenWork, at: Fraction) -> int:
    return sum(item.deadline - at > limit for limit in URGENCY_SECONDS)


def test_the_last_answer_goes_on_when_the_engine_has_nothing_else_to_run() -> None:
    capacity = {"qwen": Capacity(10, runners=1, answer_tokens_per_second=2.0)}
    items = [
        replace(work("x", 1000), tail_tokens=50.0),
        work("y", 100, deadline=NOW + 2 * DAY),
    ]
    assert seconds_until_done(items, capacity) == {"x": 125, "y": 110}


def test_of_a_model_whose_answers_were_not_timed_the_end_is_not_known() -> None:
    assert seconds_until_done([replace(work("x", 1000), tail_tokens=50.0)]) == {"x": 100}


def test_a_prompt_counts_by_what_its_tokens_were_seen_to_cost() -> None:
    """800 tokens of prompts are 100 of answers unless more is known, here of 200 in all."""
    items = [replace(work("x", 900), remaining_work=200.0, remaining_prompts=800.0)]
    rate = Capacity(90, 1, work_per_second=20.0, prompt_tokens_per_second=80.0)
    for weight, seconds in ((None, 10), (0.125, 10), (0.0, 10), (1.0, 10)):
        assert seconds_until_done(items, {"qwen": replace(rate, prompt_weight=weight)}) == {
            "x": seconds
        }
    shorter = [replace(items[0], remaining_work=110.0, remaining_prompts=80.0)]
    free, dear = (replace(rate, prompt_weight=weight) for weight in (0.0, 1.0))
    assert seconds_until_done(shorter, {"qwen": free}) == {"x": 10}
    assert seconds_until_done(shorter, {"qwen": dear}) == {"x": 2}


def test_averages_that_do_not_fit_together_make_no_engine_that_stands_still() -> None:
    items = [replace(work("x", 900), remaining_work=200.0, remaining_prompts=800.0)]
    odd = Capacity(90, 1, work_per_second=20.0, prompt_tokens_per_second=200.0, prompt_weight=0.0)
    assert seconds_until_done(items, {"qwen": odd}) == {"x": 10}


def test_a_forecast_can_be_shown_as_a_date_however_far_away_it_is() -> None:
    """A client's lines may allow two billion tokens each; rounded up to a minute as well."""
    items = [work("x", 50_000 * 2.0**31), work("y", 1e30, tenant="b")]
    for eta in forecast(items, TEN_A_SECOND, NOW).values():
        assert datetime.fromtimestamp(eta + 60, UTC).year == 9999
