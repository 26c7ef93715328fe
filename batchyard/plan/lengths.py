"""How long answers were, and how long the next ones will probably be. Pure.

Requests are told apart by *classes*: endpoint, template and the bound that they set on their
output. What was seen of a class is a histogram whose old entries fade. A class of which little is
known borrows from all requests with its endpoint and bound, whatever their template.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LEAST: Final = 8.0
"""Answers of a class, or of those that it borrows from, before anything is expected of it."""
_LEAST_OWN: Final = 4.0
"""The answers that a class needs before it is used instead of its wider class."""
_HORIZON: Final = 5_000.0
"""The weight of an answer fades to a third with as many later ones of its class."""
PROMPT_WORK: Final = 1 / 8
"""What a token of a prompt costs in tokens of answers before an engine was seen to read any: it is
read together with many others, one of an answer is a step."""
_STEPS: Final = 4
"""The steps of the histogram in each power of two: a length is known to within a tenth."""
_BIT_STEPS: Final = 2
"""The steps of :func:`answer_bits` in each power of two. With whole powers, kinds of which one has
twice as long answers are often taken for the same as long as most of them are under way."""
_HALF_AS_LONG_AGAIN: Final = 2
"""A factor of about 1.5, in steps."""


class LengthClass(NamedTuple):
    """Requests whose answers are about as long. ``template`` is a hash; empty: of any."""

    endpoint: str
    template: str
    bucket: int
    """See :func:`bucket_of`."""

    @property
    def most_tokens(self) -> float:
        """That an answer may have; inf where nothing limits it."""
        return 2.0 ** (self.bucket - 1) if self.bucket > 0 else math.inf

    @property
    def of_any_template(self) -> LengthClass:
        """The class that it borrows from."""
        return self._replace(template="")


def bucket_of(limit: int | None, samples: int = 1) -> int:
    """The bucket of a request that allows ``limit`` tokens in all its ``samples`` together.

    1 for one token, 2 for two, then a bucket for each power of two, which is the largest in it.
    Without a limit 0, and less for more samples.
    """
    if limit is None:
        return 1 - samples.bit_length()
    return (limit - 1).bit_length() + 1


@dataclass(slots=True)
class Lengths:
    """Answers of one class: how many, their tokens, and how many of each length; all faded."""

    weight: float = 0.0
    tokens: float = 0.0
    histogram: dict[int, float] = field(default_factory=dict)
    """The weight of each step, which is a quarter of a power of two; 0 is an empty answer."""

    def add(self, tokens: int) -> None:
        """One more answer; the others do not fade by it, see :meth:`followed_by`."""
        step = _step_of(tokens)
        self.weight += 1.0
        self.tokens += max(0, tokens)
        self.histogram[step] = self.histogram.get(step, 0.0) + 1.0

    def followed_by(self, newer: Lengths) -> Lengths:
        """The sum of these lengths, faded, and the ``newer`` ones."""
        kept = math.exp(-newer.weight / _HORIZON)
        histogram = {step: count * kept for step, count in self.histogram.items()}
        for step, count in newer.histogram.items():
            histogram[step] = histogram.get(step, 0.0) + count
        return Lengths(
            self.weight * kept + newer.weight, self.tokens * kept + newer.tokens, histogram
        )

    def joined(self, others: Lengths, answers: float) -> Lengths:
        """These and so many like the ``others``; none fades."""
        share = answers / others.weight if others.weight else 0.0
        histogram = dict(self.histogram)
        for step, count in others.histogram.items():
            histogram[step] = histogram.get(step, 0.0) + count * share
        return Lengths(
            self.weight + others.weight * share, self.tokens + others.tokens * share, histogram
        )

    def with_in_flight(self, written: Iterable[float], most: float = math.inf) -> Lengths:
        """These and answers that go on, of which so many tokens are ``written``.

        Without them the short ones would be overrepresented: they come first. Each counts as
        those that are longer than what is written of it, or as half as long again where none is.
        None has more than ``most`` tokens.
        """
        histogram = dict(self.histogram)
        going_on = Counter(map(_step_of, written))
        tokens = self.tokens
        for step, count in sorted(going_on.items()):
            longer = {each: found for each, found in histogram.items() if each > step}
            if longer:
                # Half of those of its own step are longer.
                longer[step] = histogram.get(step, 0.0) / 2
            else:
                longer[step + _HALF_AS_LONG_AGAIN] = 1.0
            each = count / sum(longer.values())
            for place, found in longer.items():
                histogram[place] = histogram.get(place, 0.0) + found * each
                tokens += found * each * min(most, _length_of(place))
        return Lengths(self.weight + going_on.total(), tokens, histogram)

    @property
    def mean(self) -> float:
        """Tokens of an answer; 0 where there is none."""
        return self.tokens / self.weight if self.weight else 0.0

    def quantile(self, share: float) -> float:
        """The length that this share of the answers does not exceed, to within a tenth."""
        left = share * sum(self.histogram.values())
        for step in sorted(self.histogram):
            count = self.histogram[step]
            if left <= count and step:
                return float(2 ** ((step - 1 + left / count) / _STEPS))
            left -= count
        return 0.0

    @property
    def rest(self) -> float:
        """Tokens that an answer under way at a random moment still lacks, on average."""
        squares = sum(count * length**2 for length, count in self._lengths())
        return squares / (2 * self.tokens) if self.tokens else 0.0

    def lacks(self, written: float) -> float:
        """Tokens that an answer still lacks which has ``written`` of them and goes on, on average.

        Of one that is longer than all that were seen, half as many again.
        """
        longer = [(length, count) for length, count in self._lengths() if length > written]
        if not longer:
            return written / 2
        mean = sum(length * count for length, count in longer) / sum(count for _, count in longer)
        return mean - written

    def last_of(self, answers: int) -> float:
        """How many tokens the last of so many answers under way at a moment still lacks.

        The median of it: as many times as not it is more.
        """
        lengths = list(self._lengths())
        low, high = 0.0, max((length for length, _ in lengths), default=0.0)
        if not self.tokens or answers < 1:
            return 0.0
        for _ in range(20):
            middle = (low + high) / 2
            # How likely one lacks more: what of all tokens lies behind so many of their answer.
            behind = sum(max(0.0, length - middle) * count for length, count in lengths)
            if answers * behind / self.tokens > math.log(2):
                low = middle
            else:
                high = middle
        return high

    def _lengths(self) -> Iterable[tuple[float, float]]:
        """A length in the middle of each step, and how many there are."""
        for step, count in self.histogram.items():
            yield _length_of(step), count


def _step_of(tokens: float) -> int:
    return 0 if tokens < 1 else math.floor(_STEPS * math.log2(tokens)) + 1


def _length_of(step: int) -> float:
    return 2 ** ((step - 0.5) / _STEPS) if step else 0.0


@dataclass(slots=True)
class LengthHistory:
    """The lengths of one tenant's answers of one model, by class."""

    known: dict[LengthClass, Lengths] = field(default_factory=dict)

    def of(self, each: LengthClass) -> Lengths | None:
        """What is known of a class, with what it borrows; None: too little."""
        own, others = self.known.get(each), self.known.get(each.of_any_template)
        if own is None or others is None or own.weight >= LEAST:
            found = own or others
        else:
            # As many as are missing: a few long answers of another kind would be most of the
            # tokens of one with short answers.
            found = own.joined(others, min(others.weight, LEAST - own.weight))
        return found if found is not None and found.weight >= LEAST else None

    def is_known(self, each: LengthClass) -> bool:
        """Whether enough of this very class was seen."""
        return each in self.known and self.known[each].weight >= _LEAST_OWN

    def add(self, newer: Mapping[LengthClass, Lengths]) -> None:
        """Add answers: to each class, and to that of any template."""
        for each, lengths in with_any_template(newer).items():
            self.known[each] = self.known.get(each, Lengths()).followed_by(lengths)


def with_any_template(newer: Mapping[LengthClass, Lengths]) -> dict[LengthClass, Lengths]:
    """The same, with what each class adds to that of any template."""
    found: dict[LengthClass, Lengths] = {}
    for each, lengths in newer.items():
        for to in {each, each.of_any_template}:
            found[to] = found.get(to, Lengths()).joined(lengths, lengths.weight)
    return found


class Expected(NamedTuple):
    """Tokens of an answer of a class: as they count, and as they decide what goes first."""

    tokens: float
    rank_tokens: float
    """As many as the longest class, where none of its own answers has come yet: those that are
    under way at first are the long ones."""


class Expectation(NamedTuple):
    """What is expected of a chunk: the tokens of all its requests, and :func:`answer_bits`."""

    tokens: int
    answer_bits: int


def expectation_of(
    prompt_tokens: int, planned: Mapping[int, tuple[int, int]], expected: Mapping[int, Expected]
) -> Expectation:
    """``planned``: requests and output tokens by class; ``expected``: where more is known."""
    output = rank = 0.0
    for number, (runs, tokens) in planned.items():
        found = expected.get(number)
        output += tokens if found is None else found.tokens * runs
        rank += tokens if found is None else found.rank_tokens * runs
    runs = sum(runs for runs, _ in planned.values())
    return Expectation(round(prompt_tokens + output), answer_bits(rank, runs))


def prompt_work(prompt_tokens: int, shared_tokens: int) -> float:
    """What a prompt costs, in tokens of answers, by :data:`PROMPT_WORK`."""
    return unshared_tokens(prompt_tokens, shared_tokens) * PROMPT_WORK


def unshared_tokens(prompt_tokens: int, shared_tokens: int) -> int:
    """What is to be read of a prompt. What it shares with the one before is free."""
    return max(1, prompt_tokens - shared_tokens)


def answer_bits(output_tokens: float, runs: int) -> int:
    """How long the answers of a chunk are, in half powers of two: the most go first."""
    each = output_tokens / runs if runs else 0.0
    return 0 if each < 1 else int(_BIT_STEPS * math.log2(each)) + 1
