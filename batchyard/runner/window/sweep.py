"""The order of requests from several chunks whose prompts begin alike: one walk of their tree."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

K = TypeVar("K", bound="Hashable")


class Sweep(Generic[K]):
    """Goes up through the prompts that wait, as an elevator does, and then begins again.

    For one that comes and is behind it goes back: what is between the two may still be warm, and
    from there on they go together. Who was passed over ``most_passed_over`` times is next, and the
    walk goes on from there.
    """

    def __init__(self, most_passed_over: int) -> None:
        self._most_passed_over = most_passed_over
        self._passed_over: Counter[K] = Counter()
        self._place: dict[K, bytes] = {}
        """Where the walk is, for each of those that have waited."""

    def next(self, host: K, waiting: Mapping[K, bytes], peers: Collection[K]) -> K:
        """Which is next of those that wait, by their prompts. ``peers`` walk with the host."""
        place = self._place.get(host, b"")
        come = [prompt for each, prompt in waiting.items() if each not in self._place]
        place = min([place, *come])
        chosen = max(waiting, key=lambda each: self._passed_over[each])
        if self._passed_over[chosen] < self._most_passed_over:
            chosen = min(waiting, key=lambda each: (waiting[each] < place, waiting[each]))
        self._passed_over.update(waiting.keys() - {chosen})
        del self._passed_over[chosen]
        known = self._place.keys() & set(peers)
        self._place |= dict.fromkeys((host, *known, *waiting), waiting[chosen])
        return chosen

    def forget(self, key: K) -> None:
        """Drop one that walks no more."""
        self._place.pop(key, None)
        del self._passed_over[key]
