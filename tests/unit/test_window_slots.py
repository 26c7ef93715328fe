"""The slots of a window, whose number may change."""

from __future__ import annotations

import asyncio

import pytest

from batchyard.runner.window.slots import Slots


async def taken(slots: Slots) -> int:
    """How many can be had now."""
    count = 0
    while not slots.are_all_taken():
        await slots.acquire()
        count += 1
    return count


async def test_more_slots_are_there_at_once() -> None:
    slots = Slots(2)
    assert await taken(slots) == 2
    slots.resize(5)
    assert (slots.size, await taken(slots)) == (5, 3)


async def test_slots_that_are_too_many_are_not_given_out_again() -> None:
    slots = Slots(5)
    await taken(slots)
    slots.resize(2)
    for _ in range(5):
        slots.release()
    assert await taken(slots) == 2


async def test_as_many_as_before_may_be_had_after_less_and_more() -> None:
    slots = Slots(5)
    await taken(slots)
    slots.resize(2)
    slots.release()
    slots.resize(5)
    for _ in range(4):
        slots.release()
    assert await taken(slots) == 5


async def test_what_is_held_back_is_there_after_it_was_filled() -> None:
    slots = Slots(8)
    slots.hold_back(5)
    slots.hold_back(7)
    assert await taken(slots) == 3
    slots.fill()
    assert await taken(slots) == 5


async def test_at_the_end_all_that_wait_get_in_however_many_slots_are_too_many() -> None:
    """Each lets the next one in."""
    slots = Slots(3)
    await taken(slots)
    slots.resize(1)

    async def submit() -> None:
        await slots.acquire()
        slots.release()

    waiting = [asyncio.create_task(submit()) for _ in range(4)]
    await asyncio.sleep(0)
    slots.end()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


@pytest.mark.parametrize("size", [1, 7])
async def test_the_same_number_again_changes_nothing(size: int) -> None:
    slots = Slots(size)
    slots.resize(size)
    assert await taken(slots) == size
