"""The queue of a window: in which order chunks put their requests in, and that none is shut out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from batchyard.plan.roots import Node, Roots
from batchyard.runner.window import admission
from batchyard.runner.window.admission import _ABSENT_SECONDS, Admission, AdmissionQueue
from batchyard.schedule.turns import BACKGROUND_URGENCY, Beside, QueueEntry, QueueKey
from batchyard.store import ChunkLease
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

SOON_SECONDS = 20.0
ALIKE = Roots((Node(1, 512, 0),), trunk_tokens=100, work_tokens=100)
OTHERS = Roots((Node(2, 512, 0),), trunk_tokens=100, work_tokens=100)


class Entrance:
    """A window in which requests find a slot one after the other, when ``admit`` says so."""

    def __init__(self, turn_requests: int = 1) -> None:
        self.queue = AdmissionQueue(turn_requests)
        self.order: list[str] = []
        self._slots = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    def chunk(
        self,
        name: str,
        count: int,
        *,
        tenant: str = "a",
        tokens: int = 1,
        is_small: bool = False,
        is_background: bool = False,
        roots: Roots | None = None,
        prompts: Sequence[int] = (),
        priority: int = 0,
        has_room: Callable[[], bool] = lambda: True,
    ) -> asyncio.Task[None]:
        """Begin to admit so many requests of a chunk, each of so many tokens.

        ``prompts``: a number for what each one's prompt begins with.
        """
        entry = QueueEntry(
            batch_id=name,
            tenant=tenant,
            is_small=is_small,
            urgency=BACKGROUND_URGENCY if is_background else 3,
            created_at=len(self._tasks),
            roots=roots,
            priority=priority,
        )
        lease = lease_of(name, token_estimate=tokens)
        self.queue.enter(lease.key, entry)
        admission = Admission(self.queue, lease, entry, set(), may_return=lambda: True)
        begins = [prompt.to_bytes() for prompt in prompts] or [b""] * count
        admitting = self._admit(admission, name, begins, has_room)
        self._tasks.append(asyncio.create_task(admitting))
        return self._tasks[-1]

    async def admit(self, count: int) -> str:
        """Let so many requests in; whose they were, a letter for each."""
        before = len(self.order)
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            for _ in range(count):
                self._slots.release()
                for _ in range(10):
                    await asyncio.sleep(0)
        return "".join(self.order[before:])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _admit(
        self,
        admission: Admission,
        name: str,
        begins: Sequence[bytes],
        has_room: Callable[[], bool],
    ) -> None:
        for prompt in begins:
            await admission.submit(self._submit, partial(bytes, prompt), has_room)
            self.order.append(name)
        admission.leave()

    async def _submit(self) -> None:
        await self._slots.acquire()


def lease_of(batch_id: str, *, token_estimate: int = 1) -> ChunkLease:
    return ChunkLease(
        batch_id=batch_id,
        index=0,
        model="m",
        first_record=0,
        request_count=1,
        token_estimate=token_estimate,
        deadline=0,
        epoch=1,
        owner="me",
    )


@pytest.fixture
async def entrance() -> AsyncIterator[Entrance]:
    one = Entrance()
    yield one
    await one.close()


async def test_a_chunk_by_itself_waits_for_slots_only(entrance: Entrance) -> None:
    entrance.chunk("A", 5)
    assert await entrance.admit(5) == "AAAAA"
    assert entrance.queue.is_empty


async def test_a_request_without_room_lets_all_others_go_first(entrance: Entrance) -> None:
    """Of its tenant, too; and it has its turn as soon as there is room, if nobody else waits."""
    has_room = False
    entrance.chunk("L", 2, has_room=lambda: has_room)
    entrance.chunk("A", 3)
    entrance.chunk("B", 3, tenant="b")
    assert sorted(await entrance.admit(6)) == ["A", "A", "A", "B", "B", "B"]
    assert await entrance.admit(1) == ""
    has_room = True
    entrance.queue.look()
    assert await entrance.admit(1) == "LL"


async def test_those_without_room_have_their_turns_when_there_is_some(entrance: Entrance) -> None:
    """A tenant that has come first, with several chunks, gets no more of the room."""
    room = 0
    for name in ("A", "B"):
        entrance.chunk(name, 40, has_room=lambda: room > 0)
    entrance.chunk("C", 40, tenant="c", has_room=lambda: room > 0)
    order = ""
    for _ in range(20):
        room = 1
        entrance.queue.look()
        order += await entrance.admit(1)
        room = 0
    assert order.count("C") == pytest.approx(10, abs=1)


async def test_the_room_of_a_peer_is_its_own(entrance: Entrance) -> None:
    """The walk goes on with those peers that have room."""
    entrance.chunk("A", 3, roots=ALIKE, prompts=[1, 2, 3], has_room=lambda: False)
    entrance.chunk("B", 3, roots=ALIKE, prompts=[4, 5, 6])
    assert await entrance.admit(3) == "BBB"


async def test_tenants_alternate(entrance: Entrance) -> None:
    entrance.chunk("A", 9)
    entrance.chunk("B", 9, tenant="b")
    # The first one of A had come before B was there.
    assert sorted(Counter(await entrance.admit(8)).values()) == [4, 4]


async def test_shares_are_of_tokens_and_not_of_requests(entrance: Entrance) -> None:
    entrance.chunk("A", 99, tokens=300)
    entrance.chunk("B", 99, tokens=100, tenant="b")
    order = Counter(await entrance.admit(41))
    assert order["B"] == pytest.approx(3 * order["A"], abs=3)


async def test_several_requests_of_a_chunk_follow_one_another() -> None:
    """They share what is in the engine's cache."""
    entrance = Entrance(turn_requests=4)
    entrance.chunk("A", 99)
    entrance.chunk("B", 99, tenant="b")
    order = await entrance.admit(33)
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes <= 33 / 4 + 1
    await entrance.close()


async def test_a_small_chunk_that_comes_goes_before_the_rest_of_a_turn() -> None:
    entrance = Entrance(turn_requests=50)
    entrance.chunk("A", 99)
    entrance.chunk("B", 99, tenant="b")
    await entrance.admit(10)
    entrance.chunk("s", 5, tenant="c", is_small=True)
    # One request of another chunk is on its way already, and its turn is not over.
    assert "sssss" in await entrance.admit(7)
    await entrance.close()


async def test_small_chunks_leave_a_large_one_a_quarter(entrance: Entrance) -> None:
    entrance.chunk("A", 99)
    entrance.chunk("s", 99, is_small=True)
    order = Counter(await entrance.admit(40))
    assert order["A"] == pytest.approx(10, abs=1)


async def test_a_chunk_that_does_nothing_keeps_nobody_waiting(entrance: Entrance) -> None:
    """It waits for a file, or for its own answers."""
    entrance.queue.enter(lease_of("idle").key, QueueEntry(batch_id="idle", tenant="idle"))
    entrance.chunk("A", 3)
    assert await entrance.admit(3) == "AAA"


async def test_a_chunk_that_is_cancelled_lets_the_next_one_pass(entrance: Entrance) -> None:
    """Whether it waits for its turn or for a slot."""
    passing = entrance.chunk("A", 9)
    waiting = entrance.chunk("B", 9, tenant="b")
    entrance.chunk("C", 9, tenant="c")
    await asyncio.sleep(0)
    for task in (passing, waiting):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert await entrance.admit(3) == "CCC"


async def two_behind_one() -> tuple[AdmissionQueue, list[asyncio.Task[None]]]:
    """A queue through which one chunk passes, and two that wait for it."""
    queue = AdmissionQueue(1)
    keys = [lease_of(name).key for name in "ABC"]
    for key in keys:
        queue.enter(key, QueueEntry(batch_id=key.batch_id, tenant=key.batch_id))
    await queue.begin_pass(keys[0], 1.0)
    waiting = [asyncio.create_task(queue.begin_pass(key, 1.0)) for key in keys[1:]]
    await asyncio.sleep(0)
    return queue, waiting


async def test_a_chunk_that_is_cancelled_as_its_turn_comes_lets_the_next_one_pass() -> None:
    queue, waiting = await two_behind_one()
    queue.end_pass()
    asyncio.get_running_loop().call_soon(waiting[0].cancel)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await waiting[1]
    assert waiting[0].cancelled()


async def test_a_chunk_that_is_being_cancelled_is_no_error_of_the_window() -> None:
    """Its task has not run since, so it still waits."""
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    queue, waiting = await two_behind_one()
    queue.end_pass()
    waiting[0].cancel()
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await waiting[1]
    assert not errors


async def test_requests_that_several_tasks_submit_at_once_have_the_turns_of_their_chunk() -> None:
    """None gets lost, and they follow one another as those of a single task do."""
    queue, order, slots = AdmissionQueue(2), [], asyncio.Semaphore(0)

    async def submit(admission: Admission, name: str) -> None:
        await admission.submit(slots.acquire)
        order.append(name)

    tasks = []
    for name in "AB":
        entry, lease = QueueEntry(batch_id=name, tenant=name), lease_of(name)
        queue.enter(lease.key, entry)
        admission = Admission(queue, lease, entry, set(), may_return=lambda: True)
        tasks += [asyncio.create_task(submit(admission, name)) for _ in range(6)]
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        for _ in tasks:
            await asyncio.sleep(0.001)
            slots.release()
        await asyncio.gather(*tasks)
    # A's first one had come before B was there.
    assert "".join(order) == "ABBAABBAABBA"


async def test_of_requests_that_are_submitted_at_once_one_waits_for_a_slot() -> None:
    """Though the chunk is alone: the others would be ahead of everything that comes."""
    queue, lease, slots = AdmissionQueue(2), lease_of("A"), asyncio.Semaphore(0)
    entry = QueueEntry(batch_id="A", tenant="A")
    queue.enter(lease.key, entry)
    admission = Admission(queue, lease, entry, set(), may_return=lambda: True)
    tasks = [asyncio.create_task(admission.submit(slots.acquire)) for _ in range(6)]
    await asyncio.sleep(0.01)
    assert len(slots._waiters or ()) == 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_chunk_that_has_left_does_not_wait_for_turns(entrance: Entrance) -> None:
    entry = QueueEntry(batch_id="B", tenant="b")
    admission = Admission(entrance.queue, lease_of("B"), entry, set(), may_return=lambda: True)
    entrance.chunk("A", 9)
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await admission.submit(lambda: asyncio.sleep(0))


async def test_nothing_more_is_asked_for_of_the_flows_at_the_door(entrance: Entrance) -> None:
    entrance.chunk("s", 1, tenant="small", is_small=True)
    for number in range(4):
        assert not entrance.queue.beside.has_large
        entrance.chunk(f"{number}", 1, tenant=f"{number}")
    queue_keys = {
        QueueKey("small", is_small=True),
        *(QueueKey(f"{number}", is_small=False) for number in "0123"),
    }
    assert entrance.queue.beside == Beside(
        frozenset(queue_keys), has_large=True, keeps_background_out=True
    )
    assert entrance.queue.has_room


async def test_who_waits_for_a_place_at_the_door_learns_that_one_is_free(
    entrance: Entrance,
) -> None:
    entrance.chunk("A", 1)
    waiting = asyncio.create_task(entrance.queue.until_left(3600))
    await entrance.admit(1)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await waiting


# -- background -------------------------------------------------------------------------------


async def test_nothing_of_a_background_batch_passes_while_another_chunk_is_there(
    entrance: Entrance,
) -> None:
    """But the one request that stood in the queue already."""
    entrance.chunk("b", 9, is_background=True)
    assert await entrance.admit(2) == "bb"
    entrance.chunk("n", 4)
    assert await entrance.admit(5) == "bnnnn"
    assert await entrance.admit(6) == "bbbbbb"


async def test_a_background_batch_waits_also_while_the_other_chunk_reads_its_lines(
    entrance: Entrance,
) -> None:
    entrance.chunk("b", 9, is_background=True)
    assert await entrance.admit(1) == "b"
    other = lease_of("n")
    entrance.queue.enter(other.key, QueueEntry(batch_id="n", tenant="a"))
    assert await entrance.admit(3) == "b"
    entrance.queue.leave(other.key)
    assert await entrance.admit(1) == "bbb"


async def test_background_batches_take_turns_among_themselves(entrance: Entrance) -> None:
    entrance.chunk("x", 4, tenant="x", is_background=True)
    entrance.chunk("y", 4, tenant="y", is_background=True)
    assert sorted(await entrance.admit(8)) == list("xxxxyyyy")
    assert "xxx" not in "".join(entrance.order)


async def test_background_batches_keep_no_other_out_of_the_door(entrance: Entrance) -> None:
    for number in range(12):
        lease = lease_of(f"b{number}")
        entry = QueueEntry(batch_id="b", tenant=f"{number}", urgency=BACKGROUND_URGENCY)
        entrance.queue.enter(lease.key, entry)
    assert entrance.queue.has_room
    beside = entrance.queue.beside
    assert (beside.has_large, beside.keeps_background_out) == (False, True)
    assert QueueKey("0", is_small=False) not in beside.queue_keys


async def test_what_is_at_the_door_keeps_background_batches_from_being_claimed(
    entrance: Entrance,
) -> None:
    assert not entrance.queue.beside.keeps_background_out
    entrance.chunk("b", 1, is_background=True)
    assert not entrance.queue.beside.keeps_background_out
    entrance.chunk("n", 1)
    assert entrance.queue.beside.keeps_background_out


# -- company ----------------------------------------------------------------------------------


async def test_chunks_that_begin_alike_go_in_as_one_walk_of_the_tree() -> None:
    entrance = Entrance(turn_requests=4)
    entrance.chunk("A", 6, roots=ALIKE, prompts=[1, 1, 3, 3, 5, 5])
    entrance.chunk("B", 6, roots=ALIKE, prompts=[1, 2, 3, 4, 5, 6])
    entrance.chunk("C", 3, roots=ALIKE, prompts=[2, 4, 6])
    order = await entrance.admit(15)
    left = {"A": [1, 1, 3, 3, 5, 5], "B": [1, 2, 3, 4, 5, 6], "C": [2, 4, 6]}
    prompts = [left[name].pop(0) for name in order]
    assert prompts == sorted(prompts)
    await entrance.close()


async def test_chunks_that_begin_otherwise_take_turns_with_them(entrance: Entrance) -> None:
    entrance.chunk("A", 9, roots=ALIKE, prompts=[9] * 9)
    entrance.chunk("B", 9, tenant="b", roots=OTHERS, prompts=[1] * 9)
    order = await entrance.admit(8)
    assert sorted(Counter(order).values()) == [4, 4]


async def test_tenants_that_share_a_cache_keep_their_shares() -> None:
    """They have their turns; the tree is no reason to leave them."""
    entrance = Entrance(turn_requests=4)
    entrance.chunk("A", 40, roots=ALIKE, prompts=[2] * 40)
    entrance.chunk("B", 40, tenant="b", roots=ALIKE, prompts=[1] * 40)
    order = await entrance.admit(60)
    for end in range(60):
        had = Counter(order[:end])
        assert abs(had["A"] - had["B"]) <= 4 + 1
    await entrance.close()


async def test_background_batches_that_begin_alike_are_one_walk_that_gives_way() -> None:
    entrance = Entrance(turn_requests=4)
    entrance.chunk("A", 5, roots=ALIKE, prompts=[1, 2, 3, 4, 5], is_background=True)
    entrance.chunk("B", 5, roots=ALIKE, prompts=[1, 2, 3, 4, 5], is_background=True)
    assert sorted(await entrance.admit(4)) == list("AABB")
    entrance.chunk("n", 4, roots=ALIKE, prompts=[9, 9, 9, 9])
    order = await entrance.admit(10)
    assert order.strip("AB") == "nnnn"
    assert order.index("n") <= 1, "the one that stood in the queue"
    assert sorted(order[5:]) in (list("AAABB"), list("AABBB"), list("AABB"))
    await entrance.close()


async def test_a_batch_does_not_wait_for_a_background_batch_that_begins_alike(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_ABSENT_SECONDS", 10 * SOON_SECONDS)
    reading = QueueEntry(batch_id="b", tenant="a", roots=ALIKE, urgency=BACKGROUND_URGENCY)
    entrance.queue.enter(lease_of("b").key, reading)
    entrance.chunk("n", 9, roots=ALIKE, prompts=[1] * 9)
    assert await entrance.admit(9) == "n" * 9


async def test_background_batches_let_others_join_only_if_nothing_else_is_there(
    entrance: Entrance,
) -> None:
    def enter(name: str, urgency: int) -> QueueEntry:
        entry = QueueEntry(batch_id=name, tenant="a", roots=ALIKE, urgency=urgency)
        entrance.queue.enter(lease_of(name).key, entry)
        return entry

    waits = [enter(name, BACKGROUND_URGENCY) for name in "xyz"]
    assert entrance.queue.hosts == waits[:1]
    assert not entrance.queue.beside.keeps_background_out
    other = enter("n", 3)
    assert entrance.queue.hosts == [other]
    entrance.queue.leave(lease_of("n").key)
    for name in "stuvw":
        enter(name, BACKGROUND_URGENCY)
    assert entrance.queue.hosts == []
    assert entrance.queue.has_room


async def test_a_small_batch_does_not_wait_for_a_large_one_that_begins_alike() -> None:
    """It has its larger share, but for one turn."""
    entrance = Entrance(turn_requests=4)
    entrance.chunk("L", 60, roots=ALIKE, prompts=[1] * 60)
    entrance.chunk("S", 12, roots=ALIKE, prompts=[9] * 12, is_small=True)
    order = await entrance.admit(30)
    assert order.count("S") == 12
    await entrance.close()


async def test_a_higher_priority_is_not_passed_over_for_the_sake_of_the_tree(
    entrance: Entrance,
) -> None:
    entrance.chunk("A", 5, roots=ALIKE, prompts=[1] * 5)
    entrance.chunk("B", 5, roots=ALIKE, prompts=[2] * 5, priority=1)
    # The first one of A was in the queue before there was a B that waited.
    assert (await entrance.admit(10)).lstrip("A").startswith("BBBBB")


async def test_a_chunk_that_reads_its_next_lines_is_waited_for_and_one_that_hangs_is_not() -> None:
    """It holds up nobody for longer than a moment, and not at each request."""
    entrance = Entrance(turn_requests=4)
    silent = QueueEntry(batch_id="S", tenant="a", roots=ALIKE)
    entrance.queue.enter(lease_of("S").key, silent)
    entrance.chunk("A", 50, roots=ALIKE, prompts=[1] * 50)
    began = asyncio.get_running_loop().time()
    while len(entrance.order) < 50:
        await entrance.admit(1)
        await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - began < SOON_SECONDS
    assert asyncio.get_running_loop().time() - began >= _ABSENT_SECONDS
    await entrance.close()
