"""Whose turn it is: equal shares, small before large within bounds, nobody waits for ever."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from batchyard.schedule.turns import SMALL_SHARE, QueueEntry, TenantSlots, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_COST = 10.0
NO_COST: Callable[[QueueEntry], float] = lambda _: 1.0  # noqa: E731 - a value


def entries(*, ranks: bool = True) -> st.SearchStrategy[list[QueueEntry]]:
    """Batches of a few tenants; each has another id."""
    one = st.builds(
        QueueEntry,
        batch_id=st.just(""),
        tenant=st.sampled_from("abcd"),
        urgency=st.integers(0, 3) if ranks else st.just(3),
        priority=st.integers(-1, 1) if ranks else st.just(0),
        is_ending=st.booleans() if ranks else st.just(False),
        is_small=st.booleans(),
        deadline=st.integers(0, 3),
        created_at=st.integers(0, 3),
    )
    return st.lists(one, min_size=1, max_size=12).map(
        lambda found: [replace(each, batch_id=f"b{number}") for number, each in enumerate(found)]
    )


def served(
    waiting: list[QueueEntry],
    count: int,
    cost: Callable[[QueueEntry], float] = NO_COST,
    *,
    urgent_first: bool = False,
) -> list[QueueEntry]:
    """Whose turn it was, of batches that never have enough."""
    turns = Turns(urgent_first=urgent_first)
    for each in waiting:
        turns.join(each)
    order = []
    for _ in range(count):
        order.append(turns.next(waiting))
        turns.charge(order[-1], cost(order[-1]))
    return order


# -- tenants --------------------------------------------------------------------------------


@given(entries())
def test_every_tenant_has_its_turn_before_any_has_two_more(waiting: list[QueueEntry]) -> None:
    tenants = {each.tenant for each in waiting}
    order = [each.tenant for each in served(waiting, 5 * len(tenants))]
    rounds = [order[at : at + len(tenants)] for at in range(0, len(order), len(tenants))]
    assert all(set(each) == tenants for each in rounds)


@given(entries(), st.dictionaries(st.sampled_from("abcd"), st.floats(1, MOST_COST)))
def test_tenants_get_equal_shares_whatever_each_of_their_turns_costs(
    waiting: list[QueueEntry], costs: dict[str, float]
) -> None:
    had: Counter[str] = Counter()
    for each in served(waiting, 60, lambda each: costs.get(each.tenant, 1.0)):
        had[each.tenant] += costs.get(each.tenant, 1.0)  # type: ignore[assignment] # it adds floats
        shares = [had[tenant] for tenant in {one.tenant for one in waiting}]
        assert max(shares) - min(shares) <= MOST_COST + 1e-6


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_tenant_that_comes_later_is_next_and_then_has_its_share(before: int, after: int) -> None:
    """What others had before is not owed to it, and it owes nothing for what it had then."""
    old, new = QueueEntry(batch_id="old", tenant="a"), QueueEntry(batch_id="new", tenant="b")
    turns = Turns(urgent_first=False)
    turns.join(old)
    for _ in range(before):
        turns.charge(turns.next([old]))
    turns.join(new)
    order = []
    for _ in range(after):
        order.append(turns.next([old, new]))
        turns.charge(order[-1])
    if before:
        assert order[0] is new
    assert abs(order.count(new) - order.count(old)) <= 1


def test_to_leave_and_come_back_is_worth_no_turn() -> None:
    a, b = QueueEntry(batch_id="a", tenant="a"), QueueEntry(batch_id="b", tenant="b")
    turns = Turns(urgent_first=False)
    turns.join(a)
    turns.join(b)
    turns.charge(a, 10.0)
    turns.leave(a)
    turns.join(a)
    assert [turns.next([a, b]), turns.charge(b, 9.0), turns.next([a, b])] == [b, None, b]


# -- within a tenant ------------------------------------------------------------------------


@given(entries())
def test_no_batch_goes_before_one_of_its_tenant_with_a_better_rank(
    waiting: list[QueueEntry],
) -> None:
    for each in served(waiting, 20):
        assert each.rank == min(other.rank for other in waiting if other.tenant == each.tenant)


def test_size_counts_less_than_priority_and_that_less_than_urgency() -> None:
    worst = QueueEntry(batch_id="worst", tenant="a", is_small=True)
    high = QueueEntry(batch_id="high", tenant="a", priority=1)
    urgent = QueueEntry(batch_id="urgent", tenant="a", urgency=0)
    ending = QueueEntry(batch_id="ending", tenant="a", is_ending=True)
    waiting = [worst, high, urgent, ending]
    turns = Turns(urgent_first=False)
    for each in waiting:
        turns.join(each)
    order = []
    while waiting:
        order.append(turns.next(waiting))
        waiting.remove(order[-1])
    assert order == [ending, urgent, high, worst]


@given(entries(ranks=False), st.floats(1, MOST_COST), st.floats(1, MOST_COST))
def test_small_batches_get_three_parts_of_four_and_large_ones_the_fourth(
    waiting: list[QueueEntry], small_cost: float, large_cost: float
) -> None:
    had: Counter[tuple[str, bool]] = Counter()

    def cost(each: QueueEntry) -> float:
        return small_cost if each.is_small else large_cost

    for each in served(waiting, 200, cost):
        had[each.tenant, each.is_small] += cost(each)  # type: ignore[assignment] # it adds floats
    for tenant in {each.tenant for each in waiting}:
        if len({each.is_small for each in waiting if each.tenant == tenant}) == 2:
            small, large = had[tenant, True], had[tenant, False]
            assert abs(small - SMALL_SHARE * large) <= (SMALL_SHARE + 1) * MOST_COST


@given(entries(ranks=False))
def test_of_one_size_the_earlier_deadline_goes_first_and_then_the_older(
    waiting: list[QueueEntry],
) -> None:
    for each in served(waiting, 20):
        assert each.age == min(other.age for other in waiting if other.queue_key == each.queue_key)


@given(entries())
def test_in_an_engine_no_batch_goes_before_a_more_urgent_one(waiting: list[QueueEntry]) -> None:
    most_urgent = min(each.urgency for each in waiting)
    assert {each.urgency for each in served(waiting, 20, urgent_first=True)} == {most_urgent}


def test_a_small_batch_goes_before_a_large_one_that_has_been_served() -> None:
    large = QueueEntry(batch_id="large", tenant="a", created_at=1)
    small = QueueEntry(batch_id="small", tenant="a", created_at=2, is_small=True)
    turns = Turns(urgent_first=False)
    turns.join(large)
    turns.charge(large, 1000.0)
    turns.join(small)
    assert turns.next([large, small]) is small


# -- places ---------------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_a_tenant_by_itself_gets_all_places_and_the_next_one_finds_one(most: int) -> None:
    room = TenantSlots(most)
    taken = 0
    while room.is_there_for("a"):
        room.take("a")
        taken += 1
    assert taken == most
    assert room.full_tenants() == {"a"}
    assert room.is_there_for("b")


@given(st.integers(1, 40), st.lists(st.sampled_from("abcdef"), max_size=200))
def test_places_are_never_more_than_a_third_above_what_one_tenant_gets(
    most: int, wishes: list[str]
) -> None:
    room = TenantSlots(most)
    taken = [tenant for tenant in wishes if room.is_there_for(tenant) and not room.take(tenant)]
    assert len(taken) + room.free == most + math.ceil(most / 3)
    assert room.free >= 0
    assert max(Counter(taken).values(), default=0) <= most
