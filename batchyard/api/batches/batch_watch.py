"""The changes of batches, for all clients that watch them: one query a second serves them all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Self

import msgspec

from batchyard import intervals
from batchyard.errors import BatchyardError
from batchyard.lifecycle import TERMINAL, UNFINISHED, BatchStatus
from batchyard.logs import event_logger
from batchyard.processes.beside import every
from batchyard.wire import RequestCounts, to_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from batchyard.store import BatchRecord
    from batchyard.store.batch.pages import LiveBatch

log = event_logger(__name__)

MOST_OF_A_TENANT: Final = 50
MOST_IN_ALL: Final = 500
_RATE_SECONDS: Final = 30.0
"""Over how long the speed is measured: chunks report their lines every two seconds."""


class TooManyWatch(Exception):
    """There are as many watchers as one process serves; the message says of whom."""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch is. ``tokens`` are those of its answers, prompts included."""

    object: Literal["batch.progress"] = "batch.progress"
    batch_id: str
    status: BatchStatus
    request_counts: RequestCounts
    tokens: int
    tokens_per_second: float | None = None
    """Over the last half minute; null while it is not known, and once it has ended."""
    eta_at: int | None = None
    """When it will probably be done, in Unix seconds; null while it is not known."""
    is_paused: bool = False
    wait_reason: str | None = None
    """Why nothing of it goes on now; null if it does, or may soon."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch as it was at the last look. Equal to another one if no watcher sees a difference."""

    record: BatchRecord = field(compare=False, repr=False)
    progress: BatchProgress
    batch_json: bytes = field(repr=False)
    """The Batch object, as the API sends it."""
    progress_json: bytes = field(repr=False)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.record.status in TERMINAL


class Watcher:
    """Watches a batch for one client. It sees only the newest state: a slow one skips some."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched
        self.changed = asyncio.Event()
        """Set when there may be a new state. Clear it before you read the state."""

    @property
    def seen(self) -> Seen | None:
        """The newest state; None before the first look."""
        return self._watched.seen

    @property
    def is_gone(self) -> bool:
        """Whether the batch no longer exists."""
        return self._watched.is_gone


class _Watched:
    def __init__(self) -> None:
        self.watchers: set[Watcher] = set()
        self.seen: Seen | None = None
        self.is_gone = False
        self.samples: deque[tuple[float, int]] = deque()

    def show(self, live: LiveBatch, now: float) -> None:
        """Keep the new state, and notify the watchers if they see a difference."""
        rate = self._rate(live.tokens, now) if _runs(live.record) else None
        seen = _seen(live, rate)
        if seen != self.seen:
            self.seen = seen
            self.notify()

    def notify(self) -> None:
        for watcher in self.watchers:
            watcher.changed.set()

    def _rate(self, tokens: int, now: float) -> float | None:
        self.samples.append((now, tokens))
        while len(self.samples) > 2 and now - self.samples[1][0] >= _RATE_SECONDS:
            self.samples.popleft()
        before, tokens_before = self.samples[0]
        # A chunk that another runner took over may count less than before.
        least_seconds = 2 * intervals.LOOK_SECONDS
        if now - before < least_seconds:
            return None
        return round(max(0, tokens - tokens_before) / (now - before), 1)


class BatchWatch:
    """Reads all watched batches with one query a second. Without any, it makes no query."""

    def __init__(
        self,
        look: Callable[[Collection[str]], Awaitable[Mapping[str, LiveBatch]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._tenants: Counter[str] = Counter()
        self._is_new = asyncio.Event()
        self._looking = every(
            self._pause_seconds, self._look_once, wake=self._is_new, name="watch batches"
        )

    async def __aenter__(self) -> Self:
        """Begin to read them."""
        await self._looking.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self._looking.__aexit__(None, None, None)

    @contextlib.contextmanager
    def watch(self, batch_id: str, tenant: str) -> Iterator[Watcher]:
        """A watcher of the batch for the block; ``tenant`` is the client's.

        Raises :class:`TooManyWatch`.
        """
        self._refuse_more(tenant)
        watched = self._watched.get(batch_id)
        if watched is None:
            watched = self._watched[batch_id] = _Watched()
            self._is_new.set()
        watcher = Watcher(watched)
        watched.watchers.add(watcher)
        self._tenants[tenant] += 1
        try:
            yield watcher
        finally:
            watched.watchers.discard(watcher)
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            if not watched.watchers:
                self._watched.pop(batch_id, None)

    def _refuse_more(self, tenant: str) -> None:
        if self._tenants[tenant] >= MOST_OF_A_TENANT:
            raise TooManyWatch(
                f"Your tenant watches {MOST_OF_A_TENANT} batches already, which is the most that "
                "one server process allows: close a stream, or ask for the batch instead."
            )
        if self._tenants.total() >= MOST_IN_ALL:
            raise TooManyWatch(
                f"This server sends the events of {MOST_IN_ALL} streams already: try again later, "
                "or ask for the batch instead."
            )

    def _pause_seconds(self) -> float | None:
        return intervals.LOOK_SECONDS if self._watched else None

    async def _look_once(self) -> None:
        if not self._watched:
            return
        asked = dict(self._watched)
        try:
            found = await self._look(list(asked))
        except BatchyardError as error:
            log.warning("watch.not_read", error)
            return
        except Exception as error:  # noqa: BLE001 - a defect must not end the events of all watchers
            log.error("watch.failed", cause=error)
            return
        now = self._clock()
        for batch_id, watched in asked.items():
            live = found.get(batch_id)
            if live is None:
                watched.is_gone = True
                watched.notify()
                continue
            try:
                watched.show(live, now)
            except Exception as error:  # noqa: BLE001 - as above, of one batch
                log.error("watch.failed", cause=error)


def _runs(record: BatchRecord) -> bool:
    return record.status is BatchStatus.IN_PROGRESS


def _seen(live: LiveBatch, rate: float | None) -> Seen:
    record = live.record
    runs = _runs(record)
    progress = BatchProgress(
        batch_id=record.id,
        status=record.status,
        request_counts=record.counts,
        tokens=live.tokens,
        tokens_per_second=rate,
        eta_at=record.eta_at,
        is_paused=runs and record.paused_at is not None,
        wait_reason=record.wait_reason if record.status in UNFINISHED else None,
    )
    return Seen(record, progress, to_json(record.to_wire()), to_json(progress))
