"""Coroutines run at once, a few at a time, and their results come in order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from batchyard.processes.in_order import in_order

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine
    from typing import Any


class Work:
    """Pieces that end when they are told to, and what became of them."""

    def __init__(self, count: int) -> None:
        self.ends = [asyncio.Event() for _ in range(count)]
        self.running: set[int] = set()
        self.most = 0

    async def piece(self, number: int) -> int:
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(0)
            await self.ends[number].wait()
        finally:
            self.running.remove(number)
        if number == 13:
            raise ValueError("thirteen")
        return number

    async def pieces(self, *numbers: int) -> AsyncGenerator[Coroutine[Any, Any, int]]:
        for number in numbers:
            yield self.piece(number)


async def test_results_come_in_order_though_the_last_piece_is_done_first() -> None:
    work = Work(4)
    results = asyncio.create_task(listed(work, 0, 1, 2, 3))
    for number in (3, 2, 1, 0):
        work.ends[number].set()
        await asyncio.sleep(0)
    assert await results == [0, 1, 2, 3]


async def test_no_more_run_at_once_than_asked_for() -> None:
    work = Work(9)
    for end in work.ends:
        end.set()
    assert await listed(work, *range(9)) == list(range(9))
    assert work.most <= 3


async def test_what_fails_is_raised_and_ends_the_others() -> None:
    work = Work(14)
    work.ends[13].set()
    with pytest.raises(ValueError, match="thirteen"):
        await listed(work, 13, 0, 1)
    assert not work.running


async def test_what_still_runs_ends_with_its_reader() -> None:
    work = Work(3)
    work.ends[0].set()
    async with contextlib.aclosing(in_order(work.pieces(0, 1, 2), at_once=3)) as results:
        assert await anext(results) == 0
        assert work.running
    assert not work.running


async def listed(work: Work, *numbers: int) -> list[int]:
    return [each async for each in in_order(work.pieces(*numbers), at_once=3)]
