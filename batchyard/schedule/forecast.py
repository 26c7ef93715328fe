"""When each open batch will probably be done. Values in, values out; what is open is the store's.

The model of the world: the runners of a model are one stream of tokens. It goes to the most
urgent batches first. Among batches of the same urgency the tenants share it equally, and each
tenant's share goes to one batch at a time: by priority, small ones first, then deadline, then age
(in an engine, :mod:`.turns` leaves a quarter to large ones). A batch becomes more urgent
as its deadline comes near. Background batches come after all others, and share in the same way.
Time passes only in the hours of the model's engine. Nothing new arrives. Behind the stream, the
last answer of a batch goes on for a while, which slows no other.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batchyard.plan.lengths import PROMPT_WORK
from batchyard.schedule.hours import ALWAYS, OpenTime
from batchyard.schedule.turns import BACKGROUND_URGENCY, URGENCY_SECONDS, urgency

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchyard.schedule.hours import Hours

_ROUNDING_SECONDS = 1e-3
"""What sums of floats may be off; without it, an exact second would be rounded up to the next."""
_LATEST: Final = 253_402_214_400
"""The last day of the year 9999: nobody could show a later time as a date. A client may allow two
billion tokens for each answer."""


@dataclass(frozen=True, slots=True)
class OpenWork:
    """What a batch still wants of one model. Times are Unix seconds.

    A batch of several models has one of these for each.
    """

    batch_id: str
    model: str
    tenant: str
    deadline: int
    priority: int
    created_at: int
    remaining_tokens: float
    is_paused: bool = False
    is_small: bool = False
    """Whether little of the batch is left to run."""
    remaining_work: float | None = None
    """The same in tokens of answers, see :func:`~.lengths.prompt_work`. None: not known."""
    remaining_prompts: float = 0.0
    """The tokens of prompts among those of the work."""
    tail_tokens: float = 0.0
    """What its last answer will lack when the engine has nothing else of it to run."""
    is_background: bool = False
    """It gives way to every batch that is not."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """``runners`` of a model, each with this rate, that begin in ``loading_seconds``.

    Both load and run in ``hours`` only.
    """

    tokens_per_second: float
    runners: int
    loading_seconds: float = 0.0
    hours: Hours = ALWAYS
    answer_tokens_per_second: float | None = None
    """How fast one answer comes. None: not known."""
    work_per_second: float | None = None
    """Its rate in tokens of answers, which then goes before ``tokens_per_second``."""
    prompt_tokens_per_second: float | None = None
    """What that rate has of prompts. None: not known."""
    prompt_weight: float | None = None
    """What a token of a prompt costs there, in tokens of answers. None: not known."""

    def amount(self, tokens: float, work: float | None, prompts: float) -> float:
        """So much work, in what :attr:`rate` is measured in.

        All its ``tokens``, the same as :attr:`OpenWork.remaining_work`, and what that has of
        ``prompts``.
        """
        if self.work_per_second is None or work is None:
            return tokens
        return work + self._more_of_a_prompt * prompts

    @property
    def rate(self) -> float:
        """The tokens per second of all runners together."""
        if self.work_per_second is None:
            return self.tokens_per_second * self.runners
        prompts = self.prompt_tokens_per_second or 0.0
        return (self.work_per_second + self._more_of_a_prompt * prompts) * self.runners

    @property
    def _more_of_a_prompt(self) -> float:
        """What its token costs here, less what it costs where that is not known."""
        weight = self.prompt_weight
        if weight is None or self.prompt_tokens_per_second is None or self.work_per_second is None:
            return 0.0
        more = weight - PROMPT_WORK
        # Averages that are a little apart must not make an engine that never finishes.
        return more if self.work_per_second + more * self.prompt_tokens_per_second > 0 else 0.0


def forecast(
    work: Sequence[OpenWork], capacity: Mapping[str, Capacity], now: float
) -> dict[str, int]:
    """The Unix second, rounded up, at which each batch will probably be done; :data:`_LATEST` for
    all that is later.

    Paused batches, those with a model of which no capacity is known, and those that no hours in
    sight suffice for are not in the answer. Takes O(n log n) for n batches.
    """
    by_model: dict[str, list[OpenWork]] = defaultdict(list)
    unknown = set()
    for item in work:
        if item.is_paused or _rate(capacity.get(item.model)) <= 0:
            unknown.add(item.batch_id)
        if not item.is_paused:
            by_model[item.model].append(item)
    done: dict[str, float] = {}
    for model, items in by_model.items():
        tails = _tails(items, capacity.get(model))
        for batch_id, seconds in _simulated(items, capacity.get(model), now):
            done[batch_id] = max(done.get(batch_id, 0.0), seconds + tails.get(batch_id, 0.0))
    return {
        batch_id: min(_LATEST, math.ceil(now + seconds - _ROUNDING_SECONDS))
        for batch_id, seconds in done.items()
        if batch_id not in unknown and seconds < math.inf
    }


def _tails(items: Sequence[OpenWork], capacity: Capacity | None) -> dict[str, float]:
    """How long each batch's last answer takes while the rest of the engine has other work."""
    speed = None if capacity is None else capacity.answer_tokens_per_second
    if not speed:
        return {}
    return {item.batch_id: item.tail_tokens / speed for item in items if item.remaining_tokens > 0}


def _rate(capacity: Capacity | None) -> float:
    return 0.0 if capacity is None else capacity.rate


def _simulated(
    items: Sequence[OpenWork], capacity: Capacity | None, now: float
) -> Iterator[tuple[str, float]]:
    """Each batch, and in how many seconds it is done with this model."""
    rate = _rate(capacity)
    if capacity is None or rate <= 0:
        return
    time = OpenTime(capacity.hours, now)
    at = time.later(0.0, max(0.0, capacity.loading_seconds))
    yield from ((item.batch_id, 0.0) for item in items if item.remaining_tokens <= 0)
    jobs = [
        _Job(
            item,
            item.deadline - now,
            capacity.amount(item.remaining_tokens, item.remaining_work, item.remaining_prompts),
        )
        for item in items
        if item.remaining_tokens > 0
    ]
    classes = [_UrgencyClass() for _ in range(BACKGROUND_URGENCY + 1)]
    for job in jobs:
        is_background = job.item.is_background
        classes[BACKGROUND_URGENCY if is_background else urgency(job.seconds_left - at)].add(job)
    rises = _Rises(jobs, after=at)
    while (busy := next((c for c in classes if c.heads), None)) is not None:
        finish_at = time.later(at, busy.tokens_to_next_finish() / rate)
        if finish_at <= rises.next_at:
            at = finish_at
            yield busy.finish_one().item.batch_id, at
            continue
        busy.serve(time.between(at, rises.next_at) * rate)
        at, job, target = rises.take()
        if job.home is not None:
            job.home.remove(job)
            classes[target].add(job)


class _Job:
    """A batch on its way through the simulation. ``tokens`` are right while it is not served."""

    __slots__ = ("finish", "home", "item", "order", "seconds_left", "tokens")

    def __init__(self, item: OpenWork, seconds_left: float, tokens: float) -> None:
        self.item = item
        self.seconds_left = seconds_left
        self.tokens = tokens
        self.order = (
            -item.priority,
            not item.is_small,
            item.deadline,
            item.created_at,
            item.batch_id,
        )
        self.home: _UrgencyClass | None = None
        self.finish = 0.0
        """While it is served: what its class will have served each tenant when it is done."""

    def __lt__(self, other: _Job) -> bool:
        return self.order < other.order


class _Rises:
    """When which job becomes more urgent, in order of time."""

    def __init__(self, jobs: Sequence[_Job], after: float) -> None:
        self._events = sorted(
            (
                (job.seconds_left - limit, job, target)
                for job in jobs
                if not job.item.is_background
                for target, limit in enumerate(URGENCY_SECONDS)
                if job.seconds_left - limit > after
            ),
            key=lambda event: event[0],
            reverse=True,
        )

    @property
    def next_at(self) -> float:
        return self._events[-1][0] if self._events else math.inf

    def take(self) -> tuple[float, _Job, int]:
        return self._events.pop()


class _UrgencyClass:
    """The jobs of one urgency: a queue for each tenant, whose heads are served side by side.

    Time runs in tokens that each tenant present has been served, so that a head's end is fixed
    when it becomes one, however many tenants come and go. What leaves out of turn stays in the
    heaps and is passed over when it comes up.
    """

    def __init__(self) -> None:
        self.heads: dict[str, _Job] = {}
        self._queues: dict[str, list[_Job]] = defaultdict(list)
        self._finishes: list[tuple[float, _Job]] = []
        self._served = 0.0

    def add(self, job: _Job) -> None:
        job.home = self
        tenant = job.item.tenant
        head = self.heads.get(tenant)
        if head is not None and head < job:
            heapq.heappush(self._queues[tenant], job)
            return
        if head is not None:
            head.tokens = head.finish - self._served
            heapq.heappush(self._queues[tenant], head)
        self._begin(job)

    def remove(self, job: _Job) -> None:
        job.home = None
        if self.heads[job.item.tenant] is job:
            job.tokens = job.finish - self._served
            self._begin_next(job.item.tenant)

    def tokens_to_next_finish(self) -> float:
        """How many tokens all the heads together are served until one of them is done."""
        while not self._is_served(*self._finishes[0]):
            heapq.heappop(self._finishes)
        return max(0.0, self._finishes[0][0] - self._served) * len(self.heads)

    def serve(self, tokens: float) -> None:
        """Share ``tokens`` among the heads; none of them is done with it."""
        self._served += tokens / len(self.heads)

    def finish_one(self) -> _Job:
        """Serve until a head is done. Follows ``tokens_to_next_finish``."""
        self._served, job = heapq.heappop(self._finishes)
        job.home = None
        self._begin_next(job.item.tenant)
        return job

    def _begin(self, job: _Job) -> None:
        job.finish = self._served + job.tokens
        self.heads[job.item.tenant] = job
        heapq.heappush(self._finishes, (job.finish, job))

    def _begin_next(self, tenant: str) -> None:
        queue = self._queues[tenant]
        while queue:
            job = heapq.heappop(queue)
            if job.home is self:
                self._begin(job)
                return
        del self.heads[tenant]

    def _is_served(self, finish: float, job: _Job) -> bool:
        return self.heads.get(job.item.tenant) is job and job.finish == finish
