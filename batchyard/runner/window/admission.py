"""Which chunk puts the next request into the window.

Chunks of several batches are admitted side by side, at most one of each queue key: of a tenant's
small batches one, and of its large ones. Whose turn it is says :mod:`.schedule.turns`. Several
requests of a chunk follow one another, so that they find in the engine's cache what they share. A
chunk that is slow to begin, because its input is far away or its storage does not answer, keeps no
other out.
Nothing of a background batch passes while a chunk of another one is in the queue. A chunk whose
next request is too large for the room that is left in memory lets all others go first.

Chunks of a tenant whose prompts begin alike are *peers*: where the order says nothing of them but
age, they have their turns together, and their requests go in as one walk of the prefix tree.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from batchyard.errors import StorageUnavailable
from batchyard.processes.beside import beside
from batchyard.runner.window.sweep import Sweep
from batchyard.schedule.turns import Beside, Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine

    from batchyard.schedule.turns import QueueEntry
    from batchyard.store import ChunkLease, LeaseKey

T = TypeVar("T")

SLOW_SECONDS = 1.0
_MOST_LARGE: Final = 4
"""Chunks of large batches side by side. Each begins anew in the engine's cache at each turn."""
_MOST: Final = 12
_MOST_PEERS: Final = 8
"""Chunks side by side when one more peer joins: there is room for others."""
_PASSED_OVER_TURNS: Final = 8
"""For this many turns a chunk's peers may go before it, because their prompts come first."""
_ABSENT_SECONDS: Final = 0.1
"""How long a turn waits for peers that read their next lines."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the queue, and what its prompt begins with."""

    chosen: asyncio.Future[None]
    cost: float
    prompt: bytes
    has_room: Callable[[], bool]


def _always() -> bool:
    return True


class AdmissionQueue:
    """The way into one window, for one request at a time.

    ``turn_requests``: how many requests of a chunk follow one another while others wait.
    ``on_all_begun`` is called when every chunk that is in the queue has begun.
    """

    def __init__(self, turn_requests: int, on_all_begun: Callable[[], None] = lambda: None) -> None:
        self._turn_requests = turn_requests
        self._on_all_begun = on_all_begun
        self._to_begin: set[LeaseKey] = set()
        self._turns = Turns(urgent_first=True)
        self._at: dict[LeaseKey, QueueEntry] = {}
        self._waiting: dict[LeaseKey, _Waiting] = {}
        self._passing: LeaseKey | None = None
        self._last: LeaseKey | None = None
        self._left_of_turn = 0
        self._has_left = asyncio.Event()
        self._sweep: Sweep[LeaseKey] = Sweep(_PASSED_OVER_TURNS * turn_requests)
        self._peers: dict[LeaseKey, set[LeaseKey]] = {}
        """Of each queued chunk, the tenant's others there whose prompts begin like its own."""
        self._absent: set[LeaseKey] = set()
        """Those for which their peers have waited in vain."""
        self._patience: asyncio.TimerHandle | None = None

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._at

    @property
    def is_empty(self) -> bool:
        """Whether no chunk is in the queue."""
        return not self._at

    @property
    def have_all_begun(self) -> bool:
        """Whether no chunk in the queue has still to come with its first request."""
        return not self._to_begin

    @property
    def keys(self) -> set[LeaseKey]:
        """The chunks in the queue."""
        return set(self._at)

    @property
    def batches(self) -> set[str]:
        """The batches that have a chunk in the queue."""
        return {key.batch_id for key in self._at}

    @property
    def beside(self) -> Beside:
        """What is in the queue: of the same queue keys nothing more may come."""
        at = self._at.values()
        others = [entry for entry in at if not entry.is_background]
        return Beside(
            frozenset(entry.queue_key for entry in at),
            has_large=len({each.queue_key for each in others if not each.is_small}) >= _MOST_LARGE,
            keeps_background_out=bool(others)
            or len({each.queue_key for each in at}) >= _MOST_LARGE,
        )

    @property
    def has_room(self) -> bool:
        """Whether another chunk may come. Background batches take no other's place."""
        return sum(not entry.is_background for entry in self._at.values()) < _MOST

    @property
    def hosts(self) -> list[QueueEntry]:
        """The first of each queue key, which others may join; none if there is no room.

        Background batches only if nothing else is there.
        """
        at = self._at.values()
        foremost = [each for each in at if not each.is_background] or list(at)
        if len(foremost) >= _MOST_PEERS:
            return []
        by_age = sorted(foremost, key=lambda each: each.age, reverse=True)
        return list({each.queue_key: each for each in by_age}.values())

    def enter(self, key: LeaseKey, entry: QueueEntry) -> None:
        """A chunk is to be admitted."""
        self._at[key] = entry
        self._to_begin.add(key)
        self._peers[key] = {each for each in self._at if self._are_peers(key, each)}
        for each in self._peers[key]:
            self._peers[each].add(key)
        self._turns.join(entry)

    def begin(self, key: LeaseKey) -> None:
        """The chunk has a request at hand. Another call does nothing."""
        if key in self._to_begin:
            self._to_begin.discard(key)
            # It may go before the one that has the turn.
            self._left_of_turn = 0
            if not self._to_begin:
                self._on_all_begun()

    def leave(self, key: LeaseKey) -> None:
        """All of the chunk is admitted, or no more of it is to be. A second call does nothing."""
        self.begin(key)
        if key in self._at:
            self._turns.leave(self._at.pop(key))
            self._sweep.forget(key)
            for each in self._peers.pop(key):
                self._peers[each].discard(key)
            self._absent.discard(key)
            self._has_left.set()
            if self._waiting:
                # It may have been what background batches, or its peers, waited for.
                asyncio.get_running_loop().call_soon(self._let_next)

    async def until_left(self, seconds: float) -> None:
        """Return when a chunk has left, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_left.wait()
        except TimeoutError:
            return
        self._has_left.clear()

    def has_to_wait(self, key: LeaseKey) -> bool:
        """Whether the chunk has turns: there are others, and it has not left."""
        return len(self._at) > 1 and key in self._at

    def has_room_for(self, key: LeaseKey) -> bool | None:
        """Whether there is room for the request with which the chunk waits; None: it does not."""
        waiting = self._waiting.get(key)
        return None if waiting is None else waiting.has_room()

    def look(self) -> None:
        """There is room for requests that had none."""
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_next)

    async def begin_pass(
        self,
        key: LeaseKey,
        cost: float,
        prompt: Callable[[], bytes] = bytes,
        has_room: Callable[[], bool] = _always,
    ) -> None:
        """Wait until it is the turn of the chunk; ``end_pass`` follows when its request is in.

        ``prompt``: what the request's prompt begins with, if anybody needs to know. While
        ``has_room`` says no, the request has no turn; when it says yes again, call :meth:`look`.
        """
        self._absent.discard(key)
        is_free = self._passing is None and not self._contenders() and has_room()
        if is_free and self._may_pass(key) and not self._peers.get(key):
            self._choose(key, key)
        else:
            loop = asyncio.get_running_loop()
            begins = prompt() if self._peers.get(key) else b""
            waiting = _Waiting(loop.create_future(), cost, begins, has_room)
            self._waiting[key] = waiting
            if self._passing is None:
                loop.call_soon(self._let_next)
            try:
                await waiting.chosen
            except asyncio.CancelledError:
                if self._waiting.get(key) is waiting:
                    del self._waiting[key]
                else:
                    self.end_pass()
                raise
        if key in self._at:
            self._turns.charge(self._at[key], cost)

    def end_pass(self) -> None:
        """The next one may pass."""
        self._passing = None
        if self._waiting:
            # Not at once: the chunk that has just passed is about to come back.
            asyncio.get_running_loop().call_soon(self._let_next)

    def _may_pass(self, key: LeaseKey) -> bool:
        """Whether no chunk in the queue keeps this one out; one that has left needs no turn."""
        entry = self._at.get(key)
        return (
            entry is None
            or not entry.is_background
            or all(each.is_background for each in self._at.values())
        )

    def _contenders(self) -> list[LeaseKey]:
        """The chunks that wait, and may pass."""
        return [
            key for key, each in self._waiting.items() if each.has_room() and self._may_pass(key)
        ]

    def _let_next(self) -> None:
        contenders = self._contenders()
        if self._passing is not None or not contenders:
            return
        host = self._host(contenders)
        if host is None:
            # One that has left meanwhile needs no turn: its request is dropped.
            host = key = contenders[0]
        elif self._is_expecting(host):
            return
        else:
            key = self._next_of(host, contenders)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        chosen = self._waiting.pop(key).chosen
        self._choose(key, host)
        # One that is cancelled, and has not noticed yet, gives its turn to the next.
        if not chosen.done():
            chosen.set_result(None)

    def _choose(self, key: LeaseKey, host: LeaseKey) -> None:
        if host != self._last or self._left_of_turn <= 0:
            self._last, self._left_of_turn = host, self._turn_requests
        self._left_of_turn -= 1
        self._passing = key

    def _host(self, contenders: Collection[LeaseKey]) -> LeaseKey | None:
        """Whose turn it is; None: of the contenders, none is in the queue."""
        last = self._last
        if last is not None and last in self._at and self._left_of_turn > 0:
            is_coming = last not in self._absent and last not in self._waiting
            if last in contenders or (is_coming and self._peers[last].intersection(contenders)):
                return last
        queued = {self._at[each]: each for each in contenders if each in self._at}
        return queued[self._turns.next(queued)] if queued else None

    def _is_expecting(self, host: LeaseKey) -> bool:
        """Whether a chunk of the walk is about to come, whose request may be the next."""
        missing = {host, *self._peers[host]} - self._waiting.keys() - self._absent
        if missing and self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(_ABSENT_SECONDS, self._go_without, missing)
        return bool(missing)

    def _go_without(self, missing: set[LeaseKey]) -> None:
        self._patience = None
        self._absent |= missing & self._at.keys() - self._waiting.keys()
        self._let_next()

    def _next_of(self, host: LeaseKey, contenders: Collection[LeaseKey]) -> LeaseKey:
        """Who passes when it is the host's turn: itself, or who comes first in the tree."""
        peers = self._peers[host]
        together = {self._at[each]: each for each in {host, *peers}.intersection(contenders)}
        if len(together) == 1:
            return host
        lead = self._turn_requests * self._waiting[host].cost
        equals = self._turns.equals(self._at[host], together, lead)
        prompts = {together[each]: self._waiting[together[each]].prompt for each in equals}
        return self._sweep.next(host, prompts, peers)

    def _are_peers(self, one: LeaseKey, other: LeaseKey) -> bool:
        entry, its = self._at[one], self._at[other]
        roots, others = entry.roots, its.roots
        # One of background and one that keeps it out would wait for each other.
        is_other = one != other and entry.tenant == its.tenant
        if not is_other or entry.is_background != its.is_background:
            return False
        if roots is None or others is None:
            return False
        return roots.is_worth_joining(others) or others.is_worth_joining(roots)


class Admission:
    """One chunk in the queue, where it is from the start.

    ``slow`` holds the chunks that are slow to begin: no more chunks of such a batch are leased
    meanwhile. ``may_return`` says whether the chunk may come back to the queue.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        lease: ChunkLease,
        entry: QueueEntry,
        slow: set[LeaseKey],
        *,
        may_return: Callable[[], bool],
    ) -> None:
        self._queue = queue
        self._key = lease.key
        self._cost = lease.token_estimate / lease.request_count
        self._entry = entry
        self._may_return = may_return
        self._slow = slow
        self._one_at_a_time = asyncio.Lock()
        self.at_hand = 0
        """How many requests of the chunk wait in :meth:`submit`."""
        self.is_submitting = False
        """Whether one of them has had its turn."""

    def leave(self) -> None:
        """Let the next chunk begin. A second call does nothing."""
        self._queue.leave(self._key)

    async def submit(
        self,
        submitting: Callable[[], Awaitable[None]],
        prompt: Callable[[], bytes] = bytes,
        has_room: Callable[[], bool] = _always,
    ) -> None:
        """Do so when it is the chunk's turn, and there is room for the request.

        ``prompt`` gives what the request's begins with. Several tasks may submit requests of the
        chunk: they go in one after the other.
        """
        self._queue.begin(self._key)
        self.at_hand += 1
        try:
            await self._one_at_a_time.acquire()
            has_turn = False
            try:
                if self._queue.has_to_wait(self._key) or not has_room():
                    await self._queue.begin_pass(self._key, self._cost, prompt, has_room)
                    has_turn = True
                self.is_submitting = True
                await submitting()
            finally:
                self.is_submitting = False
                # Before the turn ends: the chunk's next request is to be in the queue by then.
                self._one_at_a_time.release()
                if has_turn:
                    self._queue.end_pass()
        finally:
            self.at_hand -= 1

    @property
    def lacks_room(self) -> bool:
        """Whether its next request waits for others to make room for it."""
        return self._queue.has_room_for(self._key) is False

    @property
    def lacks_turn(self) -> bool:
        """Whether its next request has room, and waits for its turn."""
        return self._queue.has_room_for(self._key) is True

    @property
    def is_background(self) -> bool:
        """Whether the chunk waits for as long as one of another batch is in the queue."""
        return self._entry.is_background

    async def unless_slow(self, preparation: Coroutine[Any, Any, T]) -> T:
        """Return what ``preparation`` returns; meanwhile the chunk may be out of the queue.

        Raises :class:`~batchyard.errors.StorageUnavailable` if it cannot come back.
        """
        async with beside(preparation) as task:
            await asyncio.wait((task,), timeout=SLOW_SECONDS)
            if not task.done():
                await self._let_others_go_first(task)
            return task.result()

    async def _let_others_go_first(self, task: asyncio.Task[Any]) -> None:
        self._slow.add(self._key)
        self.leave()
        try:
            await asyncio.wait((task,))
        finally:
            self._slow.discard(self._key)
        if not task.cancelled() and task.exception() is None:
            if not self._may_return():
                raise StorageUnavailable("The input came late: others run here by now.")
            self._queue.enter(self._key, self._entry)
