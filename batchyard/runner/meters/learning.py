"""What a runner learns of the lengths of answers: for the rest of a batch, and for later ones.

An answer is counted in memory. What was counted is written every few seconds, in one transaction
for all batches. If that fails, it is tried again the next time, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from batchyard import intervals
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.plan.lengths import Expected, LengthClass, LengthHistory, Lengths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from batchyard.plan.records import PlannedRequest
    from batchyard.services.services import Services

log = event_logger(__name__)

FIRST_ESTIMATE_LINES: Final = 100
"""Finished lines of a batch before the rest of it is estimated anew."""
_NEXT_ESTIMATE: Final = 1.25
"""After so many times the lines it is estimated again."""
_FIRST_LOOK_LINES: Final = 8
_MOST_BATCHES: Final = 512
_PATIENCE_SECONDS: Final = 10.0
_LAST_PATIENCE_SECONDS: Final = 2.0
"""As the runner ends, which a batch may wait for."""


class UnderWay(Protocol):
    """Requests of a batch that are in an engine."""

    def written(self, number: int) -> list[float]:
        """How many tokens each answer of the length class has so far."""
        ...


class TenantLengths:
    """The lengths of one tenant's answers: what is known, and what was counted since."""

    def __init__(self, history: LengthHistory) -> None:
        self.history = history
        self.version = 0
        """Grows when what was counted has become known."""
        self._new: defaultdict[LengthClass, Lengths] = defaultdict(Lengths)
        self._unsaved: dict[LengthClass, Lengths] = {}
        self._count = 0
        self._look_at = _FIRST_LOOK_LINES

    def count(self, each: LengthClass, tokens: int) -> None:
        """Count an answer. What is expected changes at once when there are twice as many."""
        self._new[each].add(tokens)
        self._count += 1
        if self._count >= self._look_at:
            self._look_at *= 2
            self.learn()

    def learn(self) -> None:
        """Let what was counted be known from now on."""
        if not self._new:
            return
        self.history.add(self._new)
        for each, lengths in self._new.items():
            self._unsaved[each] = self._unsaved.get(each, Lengths()).followed_by(lengths)
        self._new.clear()
        self.version += 1

    @property
    def has_unsaved(self) -> bool:
        """Whether there is anything that the database does not have."""
        return bool(self._new or self._unsaved)

    def take_unsaved(self) -> dict[LengthClass, Lengths]:
        """What the database does not have; the caller writes it, or gives it back."""
        unsaved, self._unsaved = self._unsaved, {}
        return unsaved

    def give_back(self, unsaved: Mapping[LengthClass, Lengths]) -> None:
        """Take back what was not written."""
        for each, lengths in unsaved.items():
            later = self._unsaved.get(each)
            self._unsaved[each] = lengths if later is None else lengths.followed_by(later)


class BatchLengths:
    """The classes of one batch. ``table``: by their numbers in its plan, from 1."""

    def __init__(
        self, tenant: TenantLengths, table: Sequence[LengthClass] = (), requests: int = 0
    ) -> None:
        self.requests = requests
        """The number of requests of the whole batch."""
        self.finished = 0
        """Answers that this runner has counted."""
        self.estimate_at: float = FIRST_ESTIMATE_LINES
        self.tenant = tenant
        self.under_way: set[UnderWay] = set()
        """The chunks that this runner is at."""
        self._table = table
        self._version = -1
        self._found: dict[int, Lengths | None] = {}
        """The lengths by class, of this version."""
        self._expected: dict[int, Expected] | None = None

    @property
    def version(self) -> int:
        """Grows when more is expected or less."""
        return self.tenant.version

    def count(self, number: int, tokens: int) -> None:
        """Count an answer of a class; nothing for a number that the batch does not have."""
        if 0 < number <= len(self._table):
            self.finished += 1
            self.tenant.count(self._table[number - 1], tokens)

    def rank_tokens(self, number: int, planned: int) -> int:
        """What decides which request goes first; ``planned``: what the plan says of its answer."""
        found = self.expected().get(number)
        return planned if found is None else max(1, round(found.rank_tokens))

    def answer_tokens(self, planned: PlannedRequest) -> float:
        """What is expected of the answer to a request."""
        found = self.expected().get(planned.length_class)
        return planned.output_tokens if found is None else found.tokens

    def lacks(self, planned: PlannedRequest, written: float) -> float:
        """What the answer to a request still lacks that has ``written`` tokens and goes on."""
        known = self._known(planned.length_class)
        return max(planned.output_tokens - written, 0.0) if known is None else known.lacks(written)

    def expected(self) -> Mapping[int, Expected]:
        """The expected lengths by class, where anything is known."""
        self._look_again()
        if self._expected is None:
            numbers = range(1, len(self._table) + 1)
            known = {number: self._known(number) for number in numbers}
            means = {number: found.mean for number, found in known.items() if found is not None}
            longest = max(means.values(), default=0.0)
            history = self.tenant.history
            self._expected = {
                number: Expected(
                    mean, mean if history.is_known(self._table[number - 1]) else 2 * longest
                )
                for number, mean in means.items()
            }
        return self._expected

    def tail_tokens(self, runs: Mapping[int, int], seats: int) -> float:
        """What the last answer lacks when the engine runs ``seats`` and has nothing else to run.

        Less what the others lack on average, which the time that is left has in it. ``runs``:
        requests by class. Those with the shortest answers run last.
        """
        last = Lengths()
        expected = self.expected()
        for number in sorted(expected, key=lambda each: expected[each].rank_tokens):
            known = self._known(number)
            if known is None or not runs.get(number):
                continue
            last = last.joined(known, runs[number])
            if last.weight >= seats:
                break
        return max(0.0, last.last_of(seats) - last.rest)

    def _known(self, number: int) -> Lengths | None:
        if not 0 < number <= len(self._table):
            return None
        self._look_again()
        if number not in self._found:
            each = self._table[number - 1]
            known = self.tenant.history.of(each)
            under_way = [tokens for rest in self.under_way for tokens in rest.written(number)]
            if known is not None and under_way:
                known = known.with_in_flight(under_way, each.most_tokens)
            self._found[number] = known
        return self._found[number]

    def _look_again(self) -> None:
        if self._version != self.tenant.version:
            self._version = self.tenant.version
            self._found.clear()
            self._expected = None


class Learning:
    """What one runner learns of all its batches. ``seats``: what its engine runs at once."""

    def __init__(self, services: Services, model: str, *, seats: int) -> None:
        self._services = services
        self._model = model
        self._seats = seats
        self._tenants: dict[str, TenantLengths] = {}
        self._batches: dict[str, BatchLengths] = {}
        self._failing: set[str] = set()
        """What has failed the last time, which is logged once."""

    async def of(self, batch_id: str) -> BatchLengths:
        """The batch's lengths; without any class if they cannot be read. Raises nothing."""
        found = self._batches.get(batch_id)
        if found is None:
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    found = self._batches[batch_id] = await self._read(batch_id)
                self._forget_the_oldest()
            except Exception as error:  # noqa: BLE001 - whatever it is, no batch needs them
                log.warning("lengths.not_read", describe(error), batch=batch_id)
                found = BatchLengths(TenantLengths(LengthHistory()))
        return found

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Write what is learned while the block runs, and at its end."""
        over = asyncio.Event()
        writing = asyncio.create_task(self._keep_writing(until=over), name="lengths")
        try:
            yield
        finally:
            # Not cancelled at once: a write that is cut short may still happen, and happen again.
            over.set()
            await asyncio.wait([writing], timeout=_LAST_PATIENCE_SECONDS)
            writing.cancel()
            await asyncio.wait([writing])

    def _forget_the_oldest(self) -> None:
        """A runner may live for months."""
        while len(self._batches) > _MOST_BATCHES:
            del self._batches[next(iter(self._batches))]
        used = {id(batch.tenant) for batch in self._batches.values()}
        for name, tenant in list(self._tenants.items()):
            if id(tenant) not in used and not tenant.has_unsaved:
                del self._tenants[name]

    async def _read(self, batch_id: str) -> BatchLengths:
        store = self._services.store
        batch = await store.batches.get(batch_id)
        table = await store.lengths.classes_of(batch_id)
        if batch.tenant not in self._tenants:
            history = await store.lengths.of(batch.tenant, self._model)
            self._tenants.setdefault(batch.tenant, TenantLengths(history))
        return BatchLengths(self._tenants[batch.tenant], table, batch.total)

    async def _keep_writing(self, *, until: asyncio.Event) -> None:
        is_last = False
        saved_at = time.monotonic()
        while not is_last:
            with suppress(TimeoutError):
                async with asyncio.timeout(intervals.ESTIMATE_SECONDS):
                    await until.wait()
            is_last = until.is_set()
            if is_last or time.monotonic() - saved_at >= intervals.LENGTHS_SECONDS:
                saved_at = time.monotonic()
                await self._try(self._save)
            await self._try(self._estimate)

    async def _try(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await part()
        except Exception as error:  # noqa: BLE001 - whatever it is, no batch needs it
            if part.__name__ not in self._failing:
                log.warning("lengths.not_written", describe(error), model=self._model)
            self._failing.add(part.__name__)
        else:
            self._failing.discard(part.__name__)

    async def _save(self) -> None:
        for tenant in self._tenants.values():
            tenant.learn()
        taken = {name: tenant.take_unsaved() for name, tenant in self._tenants.items()}
        newer = {(name, self._model): lengths for name, lengths in taken.items() if lengths}
        if not newer:
            return
        try:
            await self._services.store.lengths.record(newer)
        except BaseException:
            for name, lengths in taken.items():
                self._tenants[name].give_back(lengths)
            raise

    async def _estimate(self) -> None:
        """Estimate what is left of the batches of which enough more is known."""
        store = self._services.store
        for batch_id, batch in list(self._batches.items()):
            if not batch.estimate_at <= batch.finished < batch.requests:
                continue
            batch.tenant.learn()
            runs = await store.chunks.expect(batch_id, batch.expected())
            await store.batch_schedule.record_tail(batch_id, batch.tail_tokens(runs, self._seats))
            batch.estimate_at = batch.finished * _NEXT_ESTIMATE
