"""The room in a window: small requests always have it, and none is too large for it."""

from __future__ import annotations

from batchyard.runner.window.room import Budget, budget_for_bodies, budget_for_sequences

PART = 10


def test_a_request_of_any_size_has_room_until_the_room_is_full() -> None:
    room = Budget(PART, 100)
    huge = PART + 10**9

    assert room.is_there_for(huge)
    taken = room.take(huge)
    assert not room.is_there_for(PART + 1)
    room.give_back(taken)
    assert room.is_there_for(huge)


def test_a_request_no_larger_than_its_slots_part_always_has_room() -> None:
    room = Budget(PART, 100)
    room.take(PART + 100)

    assert room.is_there_for(PART)
    assert room.take(PART) == 0


def test_so_many_large_requests_have_room_though_it_is_full() -> None:
    room = Budget(PART, 100, least=2)

    taken = [room.take(PART + 1000)]
    room.take(PART)
    assert room.is_there_for(PART + 1)
    taken.append(room.take(PART + 1000))
    assert not room.is_there_for(PART + 1)
    room.give_back(taken[0])
    assert room.is_there_for(PART + 1)


def test_who_waits_is_told_when_there_is_room_and_only_then() -> None:
    room = Budget(PART, 100)
    told: list[str] = []
    room.on_room = lambda: told.append("room")
    large = [room.take(PART + 60) for _ in range(3)]

    room.give_back(0)
    room.give_back(large[0])
    assert not told
    room.give_back(large[1])
    assert told == ["room"]
    room.give_back(large[2])
    assert told == ["room"]


def test_who_waits_is_told_when_there_is_more_room_than_before() -> None:
    room = Budget(PART, 100)
    told: list[str] = []
    room.on_room = lambda: told.append("room")
    taken = room.take(PART + 100)
    assert not room.is_there_for(PART + 1)
    room.resize(PART // 2, 200)
    assert told == ["room"]
    assert room.is_there_for(PART + 1)
    assert room.take(PART) == PART // 2
    room.resize(PART, 100)
    room.give_back(taken)
    room.give_back(PART // 2)
    assert room.is_there_for(PART + 1)


def test_the_parts_of_a_billion_slots_are_not_nothing() -> None:
    assert budget_for_bodies(10**9).part > 1000


def test_a_window_has_room_for_as_many_sequences_as_slots_and_for_a_few_requests_of_more() -> None:
    room = budget_for_sequences(100)

    assert sum(room.take(11) for _ in range(9)) == 90
    assert room.is_there_for(11)
    room.take(11)
    assert not room.is_there_for(2)
    assert room.is_there_for(1)

    few = budget_for_sequences(100)
    sent = 0
    while few.is_there_for(2048):
        few.take(2048)
        sent += 1
    assert sent == 4
