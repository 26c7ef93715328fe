"""Which class of answers each request of a plan belongs to, see :mod:`.lengths`. Pure.

A class has its own number in a plan, from 1; 0 is a request whose answer has no tokens. A template
that few requests share has none of its own: they belong to the class of any template.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from batchyard.plan.lengths import LengthClass, LengthHistory, bucket_of

TEMPLATE_CHARS: Final = 32
_MOST_SEEN: Final = 4_096
"""Classes that are counted; of a later one only what it is with any template."""
_MOST: Final = 200
_LEAST_REQUESTS: Final = 8
"""The fewest requests of a template that no earlier batch had."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a plan. ``numbers``: of each that was counted, its number in the plan."""

    numbers: tuple[int, ...] = (0,)
    table: tuple[LengthClass, ...] = ()
    means: tuple[float | None, ...] = (None,)
    """The expected tokens of an answer, by the number of its class; None: not known."""
    unknown: frozenset[int] = frozenset()
    """Those with a template that too few answers are known of."""

    def expected_of(self, counted: int, planned: int, requests: int) -> int:
        """About how many tokens ``requests`` answers have; ``counted`` as in ``numbers``."""
        number = self.numbers[counted]
        mean = self.means[number]
        if mean is None:
            return planned
        whole = round(mean * requests)
        return min(planned, whole) if self._is_limited(number) else whole

    def expected(self, number: int, planned: int) -> int:
        """Tokens of an answer of the class; ``planned``: by the request's own limit, or a guess."""
        mean = self.means[number]
        if mean is None:
            return planned
        return max(1, min(planned, round(mean)) if self._is_limited(number) else round(mean))

    def _is_limited(self, number: int) -> bool:
        return self.table[number - 1].bucket > 0


class ClassCounter:
    """Takes each request of a file, and numbers the classes at the end."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes, int], int] = {}
        self._counts: Counter[int] = Counter()

    def add(self, url: str, template: bytes, limit: int | None, samples: int) -> int:
        """Count a request; what :attr:`Classes.numbers` knows its class by, from 1."""
        bucket = bucket_of(limit, samples)
        key = (url, template, bucket)
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= _MOST_SEEN:
                key = (url, b"", bucket)
            found = self._seen.setdefault(key, len(self._seen) + 1)
        self._counts[found] += 1
        return found

    def count(self, counted: int) -> int:
        """How many requests were added with this answer."""
        return self._counts[counted]

    def finish(self, history: LengthHistory, secret: bytes) -> Classes:
        """Number the classes. ``secret`` is the key of the hashes that stand for templates.

        Without one no class has a template.
        """
        places: dict[LengthClass, list[int]] = {}
        for (url, template, bucket), number in self._seen.items():
            each = LengthClass(url, hashed(template, secret), bucket)
            if self._counts[number] < _LEAST_REQUESTS and not history.is_known(each):
                each = each.of_any_template
            places.setdefault(each, []).append(number)
        sizes = {each: sum(map(self._counts.get, found)) for each, found in places.items()}  # type: ignore[arg-type]  # each of them was counted
        own = sorted((each for each in places if each.template), key=lambda each: -sizes[each])
        for each in own[_MOST:]:
            places.setdefault(each.of_any_template, []).extend(places.pop(each))
        numbers = [0] * (len(self._seen) + 1)
        for number, found in enumerate(places.values(), start=1):
            for counted in found:
                numbers[counted] = number
        expected = [history.of(each) for each in places]
        return Classes(
            tuple(numbers),
            tuple(places),
            (None, *(None if found is None else found.mean for found in expected)),
            frozenset(
                number
                for number, each in enumerate(places, start=1)
                if each.template and not history.is_known(each)
            ),
        )


def hashed(template: bytes, secret: bytes) -> str:
    """What stands for a template in the database; empty for none, and without a ``secret``."""
    if not template or not secret:
        return ""
    return blake2b(template, key=secret, digest_size=TEMPLATE_CHARS // 2).hexdigest()
