"""Whose turn it is: the order in which batches are served, in every queue they stand in. Pure.

A batch stands in a queue until a process leases it, until it is fetched, planned and collected
there, and until its requests enter an engine. The order is the same everywhere:

1. In an engine, the more urgent class first: how long until the deadline. Elsewhere the work is
   short, and urgency counts only among the batches of one tenant.
2. Tenants get equal shares, each for as long as it has something in the queue.
3. Among the batches of one tenant: one of which only the files are missing, then the more urgent
   class, then the higher priority.
4. Among those, small batches and the ends of large ones get :data:`SMALL_SHARE` times what large
   ones get. So a small batch does not wait for a large one, and many small ones leave the large one
   a quarter.
5. Then the earlier deadline, then age.

*Background* batches are a class of their own below all others, in which no deadline makes them more
urgent. In an engine nothing of them is begun while anything else could be.

:class:`Turns` decides in a process. The claims of the store are the same order as SQL, in
``store.batch.order``; a test compares them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from batchyard.plan.roots import Roots

K = TypeVar("K", bound="Hashable")
T = TypeVar("T")

URGENCY_SECONDS: Final = (3_600, 21_600, 86_400)
"""Up to an hour, six hours, a day left until the deadline; a fourth class has more.

Classes and not the deadline itself: with it, the batches with the
shortest windows would keep all others waiting.
"""
BACKGROUND_URGENCY: Final = len(URGENCY_SECONDS) + 1
"""The class of background batches: after all others."""
BACKGROUND_WINDOW: Final = "background"
"""The completion window of a batch that runs only when nothing else wants its engine."""
SMALL_REQUESTS: Final = 256
"""A batch with so many requests is small, and so is the end of a larger one."""
SMALL_BYTES: Final = 1024**2
"""An input file of this size is small, before its lines are counted."""
SMALL_SHARE: Final = 3
"""What small batches get of their tenant's share for each part that goes to its large ones."""
_MOST_OF_FREE: Final = 3
"""A tenant may have so many times the places that are left free: the next tenant finds some."""


def urgency(seconds_left: float) -> int:
    """The class of a batch whose deadline is so far away; 0 goes first."""
    return bisect_left(URGENCY_SECONDS, seconds_left)


class QueueKey(NamedTuple):
    """The batches that take one another's place in a queue: of one tenant and about one size."""

    tenant: str
    is_small: bool
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """What a process that asks for more has at hand already."""

    queue_keys: frozenset[QueueKey] = frozenset()
    """The keys of whose batches it takes nothing more."""
    has_large: bool = False
    """Whether it has enough of large batches."""
    keeps_background_out: bool = False
    """It has others than background batches, or enough of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """What decides when a batch has its turn."""

    batch_id: str
    tenant: str
    urgency: int = len(URGENCY_SECONDS)
    priority: int = 0
    is_ending: bool = False
    """Whether only its files are missing."""
    is_small: bool = False
    deadline: float = 0.0
    created_at: float = 0.0
    roots: Roots | None = field(default=None, compare=False, repr=False)
    """What its prompts begin with, for an engine; None: not known."""
    is_parent: bool = False
    """Its process waits for other batches, its parts."""
    adapters: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of its model that its lines name, for an engine."""
    planned_at: int = field(default=0, compare=False)
    """When these were found, in Unix seconds."""

    @property
    def queue_key(self) -> QueueKey:
        """Which others go before or after it, and share with no third."""
        return QueueKey(self.tenant, self.is_small, self.is_background)

    @property
    def is_background(self) -> bool:
        """Whether it gives way to every batch that is not."""
        return self.urgency == BACKGROUND_URGENCY

    @property
    def rank(self) -> tuple[bool, int, int]:
        """What goes before size, among the batches of a tenant; the least goes first."""
        return (not self.is_ending, self.urgency, -self.priority)

    @property
    def age(self) -> tuple[float, float, str]:
        """What decides at last; the least goes first."""
        return (self.deadline, self.created_at, self.batch_id)


class Turns:
    """The turns in one queue. What stands in it has joined; what it costs is charged.

    ``urgent_first``: a more urgent class goes before a less urgent one of any tenant.
    """

    def __init__(self, *, urgent_first: bool) -> None:
        self._urgent_first = urgent_first
        self._tenants: _Shares[str] = _Shares()
        self._sizes: defaultdict[str, _Shares[bool]] = defaultdict(_Shares)

    def join(self, entry: QueueEntry) -> None:
        """The batch stands in the queue now. A new tenant begins without turns of the past."""
        self._tenants.join(entry.tenant)
        self._sizes[entry.tenant].join(entry.is_small)

    def leave(self, entry: QueueEntry) -> None:
        """The batch does not stand in the queue any more."""
        self._tenants.leave(entry.tenant)
        sizes = self._sizes[entry.tenant]
        sizes.leave(entry.is_small)
        if sizes.is_empty:
            del self._sizes[entry.tenant]

    def charge(self, entry: QueueEntry, cost: float = 1.0) -> None:
        """The batch, which has joined, was served so much."""
        self._tenants.charge(entry.tenant, cost)
        own = cost / SMALL_SHARE if entry.is_small else cost
        self._sizes[entry.tenant].charge(entry.is_small, own)

    def next(self, waiting: Collection[QueueEntry]) -> QueueEntry:
        """Whose turn it is, of at least one, all of which have joined."""
        if self._urgent_first:
            waiting = _least(waiting, lambda each: each.urgency)
        # Between tenants that have had as much, too.
        in_order = sorted(waiting, key=lambda each: (not each.is_small, each.age))
        tenant = self._tenants.first(each.tenant for each in in_order)
        own = _least([each for each in in_order if each.tenant == tenant], lambda each: each.rank)
        # Small ones before large ones where both have had their share.
        sizes = sorted({each.is_small for each in own}, reverse=True)
        is_small = self._sizes[tenant].first(sizes)
        return next(each for each in own if each.is_small is is_small)

    def equals(
        self, chosen: QueueEntry, waiting: Collection[QueueEntry], lead: float
    ) -> list[QueueEntry]:
        """Those of the waiting before which ``chosen``, whose turn it is, goes only by age.

        Itself among them. Of the other size, those that were served at most ``lead`` more.
        """
        sizes = self._sizes[chosen.tenant]
        return [
            each
            for each in waiting
            if (each.tenant, each.rank) == (chosen.tenant, chosen.rank)
            and sizes.lead(each.is_small, chosen.is_small) <= lead
        ]


class TenantSlots:
    """Places of which no tenant may take the last: ``most`` for one that is by itself."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = most + -(-most // _MOST_OF_FREE)
        self._taken: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """How many places are free."""
        return self._places - self._taken.total()

    def take(self, tenant: str) -> None:
        """One place more is the tenant's."""
        self._taken[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """One place less is the tenant's."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    def is_there_for(self, tenant: str, *, among: int = 1) -> bool:
        """Whether the tenant may take one more, where so many tenants are to get equal parts."""
        return self._taken[tenant] < min(-(-self._most // among), _MOST_OF_FREE * self.free)

    def full_tenants(self) -> set[str]:
        """The tenants that have places, and may take no more."""
        return {tenant for tenant in self._taken if not self.is_there_for(tenant)}


class _Shares(Generic[K]):
    """Equal shares for all that are present, whatever each unit costs.

    The one that was served least is first. One that comes has been served as much as the least
    served that is there: what was served before it came does not count.
    """

    def __init__(self) -> None:
        self._present: Counter[K] = Counter()
        self._served: dict[K, float] = {}
        self._last_turn: dict[K, int] = {}
        self._turns = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        return not self._present

    def join(self, key: K) -> None:
        if key not in self._present:
            floor = min((self._served[each] for each in self._present), default=0.0)
            self._served[key] = max(self._served.get(key, 0.0), floor)
            self._forget(floor)
        self._present[key] += 1

    def leave(self, key: K) -> None:
        self._present[key] -= 1
        if not self._present[key]:
            del self._present[key]
        if not self._present:
            self._served.clear()
            self._last_turn.clear()

    def charge(self, key: K, cost: float) -> None:
        self._served[key] += cost
        self._last_turn[key] = next(self._turns)

    def first(self, keys: Iterable[K]) -> K:
        """The one of those served least whose last turn is longest ago; then in their order."""
        return min(keys, key=lambda each: (self._served[each], self._last_turn.get(each, 0)))

    def lead(self, one: K, other: K) -> float:
        """How much more one was served than the other."""
        return self._served[one] - self._served[other]

    def _forget(self, floor: float) -> None:
        for each in [each for each, served in self._served.items() if served < floor]:
            if each not in self._present:
                del self._served[each]
                self._last_turn.pop(each, None)


def _least(values: Iterable[T], key: Callable[[T], Any]) -> list[T]:
    """All values whose key is the least, in their order."""
    found = list(values)
    least = min(map(key, found))
    return [each for each in found if key(each) == least]
