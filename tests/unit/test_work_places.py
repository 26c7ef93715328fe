"""The places in which batches are worked on: who waits for whom, and that no place is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import pytest

from batchyard.schedule.turns import QueueEntry
from batchyard.services.leases import work_places
from batchyard.services.leases.work_places import WorkSlot, WorkSlots
from tests.patience import PATIENCE

SMALL, LARGE = 2, 4


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> WorkSlots:
    monkeypatch.setattr(work_places, "_SMALL_AT_ONCE", SMALL)
    monkeypatch.setattr(work_places, "_LARGE_AT_ONCE", LARGE)
    return WorkSlots()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Queue:
    """Batches that have asked for a place, in the order in which they got one."""

    def __init__(self, places: WorkSlots) -> None:
        self.places: defaultdict[str, WorkSlot] = defaultdict(lambda: WorkSlot(places))
        self.got: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, batch_id: str, tenant: str, *, is_small: bool = True) -> None:
        entry = QueueEntry(
            batch_id=batch_id,
            tenant=tenant,
            is_small=is_small,
            created_at=len(self.tasks),
        )
        self.tasks[batch_id] = asyncio.create_task(self._take(entry))
        await settled()

    async def give_back(self, batch_id: str) -> None:
        self.places[batch_id].give_back()
        await settled()

    async def cancel(self, batch_id: str) -> None:
        self.tasks[batch_id].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.tasks[batch_id]

    async def _take(self, entry: QueueEntry) -> None:
        await self.places[entry.batch_id].take(entry)
        self.got.append(entry.batch_id)


async def test_a_place_that_becomes_free_goes_to_the_tenant_whose_turn_it_is(
    places: WorkSlots,
) -> None:
    queue = Queue(places)
    for number in range(5):
        await queue.ask(f"many-{number}", "many")
    for number in range(2):
        await queue.ask(f"one-{number}", "one")
    # There is a place for a tenant that comes, and from then on each has its part.
    assert queue.got == ["many-0", "many-1", "one-0"]
    await queue.give_back("many-0")
    assert queue.got == ["many-0", "many-1", "one-0"]
    await queue.give_back("one-0")
    await queue.give_back("many-1")
    assert queue.got[3:] == ["one-1", "many-2"]


async def test_large_batches_leave_small_ones_their_places(places: WorkSlots) -> None:
    queue = Queue(places)
    for number in range(LARGE + 1):
        await queue.ask(f"large-{number}", "a", is_small=False)
    await queue.ask("small", "a")
    assert queue.got == [*(f"large-{number}" for number in range(LARGE)), "small"]


async def test_large_batches_of_one_tenant_leave_a_place_to_those_of_another(
    places: WorkSlots,
) -> None:
    queue = Queue(places)
    for number in range(LARGE + 1):
        await queue.ask(f"many-{number}", "many", is_small=False)
    await queue.ask("one", "one", is_small=False)
    assert "one" in queue.got
    assert f"many-{LARGE}" not in queue.got


async def test_who_asks_again_gives_back_its_place_first(places: WorkSlots) -> None:
    """A batch goes on with its next step when it is its turn, and has one place at most."""
    queue = Queue(places)
    for batch_id in ("a-0", "a-1", "a-2"):
        await queue.ask(batch_id, "a")
    await queue.ask("a-0", "a")
    assert queue.got == ["a-0", "a-1", "a-2"]
    await queue.give_back("a-1")
    assert queue.got == ["a-0", "a-1", "a-2", "a-0"]


async def test_a_cancelled_batch_costs_no_place(places: WorkSlots) -> None:
    """While it waits, and when its turn has just come."""
    queue = Queue(places)
    for batch_id in ("a-0", "a-1", "a-2", "a-3", "a-4"):
        await queue.ask(batch_id, "a")
    await queue.cancel("a-2")
    queue.places["a-0"].give_back()
    await queue.cancel("a-3")
    await settled()
    assert queue.got == ["a-0", "a-1", "a-4"]


async def test_a_batch_that_is_being_cancelled_is_no_error_of_the_one_that_gives_back(
    places: WorkSlots,
) -> None:
    """Its task has not run since, so it still stands in the queue."""
    queue = Queue(places)
    for batch_id in ("a-0", "a-1", "a-2", "a-3"):
        await queue.ask(batch_id, "a")
    queue.tasks["a-2"].cancel()
    queue.places["a-0"].give_back()
    await settled()
    assert queue.got == ["a-0", "a-1", "a-3"]


async def test_to_give_back_what_one_does_not_have_changes_nothing(places: WorkSlots) -> None:
    queue = Queue(places)
    await queue.give_back("a-0")
    for batch_id in ("a-0", "a-1", "a-2"):
        await queue.ask(batch_id, "a")
    assert queue.got == ["a-0", "a-1"]


async def test_a_batch_that_is_claimed_here_a_second_time_waits_beside_the_first(
    places: WorkSlots,
) -> None:
    """The work under the older claim is about to end; neither of them waits for ever."""
    queue = Queue(places)
    for batch_id in ("a-0", "a-1"):
        await queue.ask(batch_id, "a")
    again = [
        asyncio.create_task(
            WorkSlot(places).take(QueueEntry(batch_id="a-2", tenant="a", is_small=True))
        )
        for _ in range(2)
    ]
    await settled()
    for batch_id in ("a-0", "a-1"):
        await queue.give_back(batch_id)
    async with asyncio.timeout(PATIENCE * 10):
        await asyncio.gather(*again)
