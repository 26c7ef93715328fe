"""The room for the bodies of a window: small ones always have it, and none is too large for it."""

from __future__ import annotations

from batchyard.runner.body_room import BodyRoom

SLOTS = 64


def test_a_body_of_any_size_has_room_until_the_room_is_full() -> None:
    room = BodyRoom(SLOTS, total_bytes=100)
    huge = room.part_bytes + 10**9

    assert room.is_there_for(huge)
    taken = room.take(huge)
    assert not room.is_there_for(room.part_bytes + 1)
    room.give_back(taken)
    assert room.is_there_for(huge)


def test_a_body_no_larger_than_its_slots_part_always_has_room() -> None:
    room = BodyRoom(SLOTS, total_bytes=100)
    room.take(room.part_bytes + 100)

    assert room.is_there_for(room.part_bytes)
    assert room.take(room.part_bytes) == 0


def test_who_waits_is_told_when_there_is_room_and_only_then() -> None:
    room = BodyRoom(SLOTS, total_bytes=100)
    told: list[str] = []
    room.on_room = lambda: told.append("room")
    large = [room.take(room.part_bytes + 60) for _ in range(3)]

    room.give_back(0)
    room.give_back(large[0])
    assert not told
    room.give_back(large[1])
    assert told == ["room"]
    room.give_back(large[2])
    assert told == ["room"]


def test_the_parts_of_a_billion_slots_are_not_nothing() -> None:
    assert BodyRoom(10**9).part_bytes > 1000
