"""Which options of an engine suit its work: what to try next, when to stop, what to keep. Pure.

The work itself is the probe. The engine's speed is measured with its own options, then with one
other option at a time, as long as that may gain anything with work of this shape, and as long as
what is left of the work is many times what the restarts cost.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Point = tuple[tuple[str, str], ...]
"""Options and their values, in the order of their names, which the engine gets besides its own."""
DEFAULT: Final[Point] = ()

MOST_PROBES: Final = 4
_MOST_FRUITLESS: Final = 2
"""In a row."""
MARGIN: Final = 0.03
"""A gain that is smaller is noise."""
_LEAST_EXPECTED: Final = 0.05
"""Of gain, before anything is tried for it."""
MOST_SPENT: Final = 0.05
"""Of the time of the work, for restarts and for probes that were slower."""
_PARTS: Final = 3
"""Of a sample. They tell how exact it is."""
LEAST_PART_ANSWERS: Final = 48
"""Each part has as many answers as the engine has seats, and no fewer than that."""
LEAST_PART_SECONDS: Final = 10.0
_HOPELESS: Final = 0.85
"""A trial with less of the best speed in its first part is over."""
_LATE: Final = 4.0
"""A trial that takes so many times as long as the first sample is over."""
_LIKE: Final = 1.5
_LIKE_TOKENS: Final = 16
"""Samples whose requests differ by more are not compared."""
_PROMPT_WORK: Final = 1 / 8
"""A token of a prompt is read together with many others, one of an answer is a step."""
_GRAM: Final = 3
_COPIED: Final = 0.25
"""A shape's share of copied words is known to within that."""


class Kind(StrEnum):
    """What an option changes."""

    STEPS = "steps"
    """How many tokens a step computes."""
    GUESSES = "guesses"
    """Where the next tokens of an answer are guessed from."""
    SPLIT = "split"
    """Over how many devices the model is split."""


class Axis(NamedTuple):
    """An option of the engine, without its dashes, and the values that may be tried."""

    name: str
    values: tuple[str, ...]
    kind: Kind


class Answered(NamedTuple):
    """Tokens of one answered request."""

    computed_prompt: int
    """Of its prompt, what the cache did not have."""
    cached: int
    output: int


class Shape(NamedTuple):
    """Work that is alike: lengths in powers of four, shares in quarters."""

    prompt: int
    output: int
    shared: int
    copied: int | None = None
    """Of the words of answers, what is in the prompt or earlier in the answer; None: not known."""

    @classmethod
    def of(
        cls,
        prompt_tokens: float,
        output_tokens: float,
        shared: float,
        copied: float | None = None,
    ) -> Shape:
        """``prompt_tokens`` and ``output_tokens`` of a request; ``shared`` and ``copied``: 0 to 1.

        ``shared``: how much of the prompts the cache has, or the plan says that it will.
        """
        return cls(
            _bucket(prompt_tokens),
            _bucket(output_tokens),
            round(min(1.0, max(0.0, shared)) / 0.25),
            None if copied is None else round(copied / _COPIED),
        )

    @classmethod
    def read(cls, text: str) -> Shape:
        """The shape that ``str`` has written. Raises ``ValueError`` for any other text."""
        prompt, output, shared, copied = text.split("-")
        return cls(int(prompt), int(output), int(shared), None if copied == "x" else int(copied))

    def __str__(self) -> str:
        """For a key."""
        copied = "x" if self.copied is None else self.copied
        return f"{self.prompt}-{self.output}-{self.shared}-{copied}"

    def distance(self, other: Shape) -> int:
        """0 for the same, up to 1 for a neighbour in each respect, more for others."""
        pairs = [(self.prompt, other.prompt), (self.output, other.output)]
        pairs.append((self.shared, other.shared))
        if self.copied is not None and other.copied is not None:
            pairs.append((self.copied, other.copied))
        return max(abs(one - another) for one, another in pairs)


class Tuned(NamedTuple):
    """What is remembered of one shape."""

    shape: Shape
    """As it was measured."""
    planned: Shape
    """The same work as the plan estimates it: it is known before the engine starts."""
    gains: Mapping[Point, float | None]
    """Speeds over that of the engine's own options; None: it did not work."""
    is_done: bool
    """There is nothing left to try."""

    @property
    def best(self) -> Point:
        """The fastest."""
        return max(
            (point for point, gain in self.gains.items() if gain is not None),
            key=lambda point: self.gains[point] or 0.0,
            default=DEFAULT,
        )

    @property
    def gain(self) -> float:
        """Of the best."""
        return max((gain for gain in self.gains.values() if gain is not None), default=1.0)


class Change(NamedTuple):
    """The engine is to run with these options. ``is_trial``: to see how fast it is."""

    point: Point
    is_trial: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers of an engine that was full all the time. ``seconds`` and ``tokens`` of each part."""

    requests: int
    computed_prompt: int
    cached: int
    output: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Tokens computed per second: of prompts what was not cached, and answers."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def error(self) -> float:
        """The standard error of the rate, as a share of it."""
        rates = [
            tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)
        ]
        if len(rates) < 2:
            return 0.0
        return statistics.stdev(rates) / statistics.mean(rates) / math.sqrt(len(rates))

    @property
    def per_second(self) -> float:
        """Requests."""
        return self.requests / sum(self.seconds)

    @property
    def prefill_share(self) -> float:
        """Of the work, what reading prompts is."""
        prompts = self.computed_prompt * _PROMPT_WORK
        return prompts / max(1.0, prompts + self.output)

    def shape(self, copied: float | None) -> Shape:
        """Of its work."""
        prompt = self.computed_prompt + self.cached
        shared = self.cached / max(1, prompt)
        return Shape.of(prompt / self.requests, self.output / self.requests, shared, copied)

    def is_like(self, other: Sample) -> bool:
        """Whether their speeds can be compared."""
        pairs = ((self.computed_prompt, other.computed_prompt), (self.output, other.output))
        return all(
            _are_near(one / self.requests, another / other.requests) for one, another in pairs
        )


class Meter:
    """Makes samples of answers. The first answers of an engine are not counted: it fills."""

    def __init__(self, seats: int, part_seconds: float) -> None:
        self._fill_answers = seats
        self._part_answers = max(LEAST_PART_ANSWERS, seats)
        self._part_seconds = part_seconds
        self.reset()

    def reset(self) -> None:
        """The engine was not full: what comes next is the beginning of another sample."""
        self._left_out = self._fill_answers
        self._part_began: float | None = None
        self._in_part = 0
        self._part_tokens = 0
        self._sums = [0, 0, 0, 0]
        self._in_parts = [0, 0, 0, 0]
        self._tokens: list[int] = []
        self._seconds: list[float] = []

    def count(self, now: float, answer: Answered) -> None:
        """Count an answer."""
        if self._left_out:
            self._left_out -= 1
            if not self._left_out:
                self._part_began = now
            return
        self._in_part += 1
        self._part_tokens += answer.computed_prompt + answer.output
        for index, count in enumerate((1, *answer)):
            self._sums[index] += count
        began = self._part_began or 0.0
        if self._in_part >= self._part_answers and now - began >= self._part_seconds:
            self._tokens.append(self._part_tokens)
            self._seconds.append(max(1e-9, now - began))
            self._in_parts = list(self._sums)
            self._part_began, self._in_part, self._part_tokens = now, 0, 0

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(self._seconds)

    def sample(self) -> Sample | None:
        """What was measured in the parts that are complete; None: nothing yet."""
        if not self._seconds:
            return None
        requests, computed_prompt, cached, output = self._in_parts
        return Sample(
            requests, computed_prompt, cached, output, tuple(self._tokens), tuple(self._seconds)
        )


@dataclass(slots=True)
class Search:
    """What was tried for work of one shape, and what is worth trying next."""

    axes: Sequence[Axis]
    work: Sample
    copied: float
    gains: dict[Point, float | None] = field(default_factory=dict)
    best: Point = DEFAULT
    fruitless: int = 0
    dropped: set[Kind] = field(default_factory=set)

    def next(self) -> Point | None:
        """The best point with one other option; None: nothing is left that may gain anything."""
        tried = {each for point in self.gains for each in point}
        probes = sum(point != DEFAULT for point in self.gains)
        if probes >= MOST_PROBES or self.fruitless >= _MOST_FRUITLESS:
            return None
        candidates = [
            (self._expected(axis.kind), axis.name, value)
            for axis in self.axes
            for value in axis.values
            if axis.kind not in self.dropped and (axis.name, value) not in tried
        ]
        # The first of equals: values are in the order in which they are to be tried.
        expected, name, value = max(candidates, key=lambda each: each[0], default=(0.0, "", ""))
        if expected < _LEAST_EXPECTED:
            return None
        return tuple(sorted({**dict(self.best), name: value}.items()))

    def record(self, point: Point, over_best: float | None, error: float = 0.0) -> None:
        """Its speed over the best one's so far; None: it did not work."""
        if over_best is None:
            self.gains[point] = None
            self.fruitless += 1
            if point == self.best:
                self.best = DEFAULT
            return
        best_gain = self.gains.get(self.best) or 1.0
        if over_best >= 1 + max(MARGIN, error):
            self.gains[point] = best_gain * over_best
            self.best, self.fruitless = point, 0
        else:
            self.gains[point] = best_gain * min(1.0, over_best)
            self.fruitless += 1

    def _expected(self, kind: Kind) -> float:
        """What it may gain, roughly, with such work."""
        prefill = self.work.prefill_share
        return {
            Kind.STEPS: 0.2 * prefill,
            # Answers that repeat nothing are slower with guesses.
            Kind.GUESSES: self.copied * (1 - prefill) if self.copied >= _COPIED else 0.0,
            Kind.SPLIT: 0.5,
        }[kind]


class Tuner:
    """Decides, for one engine. ``memory``: what is known of other work of the same engine.

    ``count`` gets each answer; ``look`` is called regularly and says when the engine is to run with
    other options; ``begun`` is called whenever it begins to run. Times are of one clock.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        seats: int,
        memory: Iterable[Tuned] = (),
        *,
        part_seconds: float | None = None,
    ) -> None:
        self._axes = axes
        self._memory = {each.shape: each for each in memory}
        self._meter = Meter(seats, LEAST_PART_SECONDS if part_seconds is None else part_seconds)
        self.point = DEFAULT
        self.is_trial = False
        self.is_done = not axes
        self.planned = Shape(0, 0, 0)
        """Of what is left to do; whoever reads that sets it."""
        self._shape: Shape | None = None
        """Of the work, once it is known."""
        self._search: Search | None = None
        self._best: Sample | None = None
        """Of the best options so far."""
        self._copied: list[float] = []
        self._full_since = 0.0
        self._first_at: float | None = None
        self._first_seconds: float | None = None
        """How long the first sample took, from the engine's start."""
        self._cost_seconds = 0.0
        self._spent_seconds = 0.0
        self.wants_copied = not self.is_done

    def first(self, planned: Shape) -> Point:
        """The options to begin with, by what is remembered of such work."""
        self.planned = planned
        near = [each for each in self._memory.values() if each.planned.distance(planned) <= 1]
        found = min(near, key=lambda each: each.planned.distance(planned), default=None)
        if found is None or found.best == DEFAULT:
            return DEFAULT
        self._shape = found.shape
        return found.best

    def begun(self, now: float, point: Point, cost_seconds: float, *, is_trial: bool) -> None:
        """The engine runs now. ``cost_seconds``: how long nothing ran for it."""
        self.point, self.is_trial = point, is_trial
        self._full_since = now
        if self._first_at is None:
            self._first_at = now
        else:
            self._spent_seconds += cost_seconds
        self._cost_seconds = max(self._cost_seconds, cost_seconds)
        self._meter.reset()

    def count(self, now: float, answer: Answered) -> None:
        """Count an answer of the engine."""
        if not self.is_done:
            self._meter.count(now, answer)

    def count_copied(self, share: float) -> None:
        """Count how much of an answer is copied."""
        self._copied.append(share)
        self.wants_copied = len(self._copied) < 64

    def look(self, now: float, *, is_full: bool, left_requests: float) -> Change | None:
        """What is to be changed now. ``left_requests``: this engine's share of what is left."""
        if self.is_done:
            return None
        if not is_full:
            self._meter.reset()
            self._full_since = now
            return None
        sample = self._meter.sample()
        if not self._is_measured(now, sample):
            return None
        if self._search is None:
            assert sample is not None  # noqa: S101 - only a trial is ended without one
            return self._after_first(sample, now, left_requests)
        return self._after_trial(self._search, sample, now, left_requests)

    def failed(self, point: Point, kinds: Iterable[Kind] = ()) -> None:
        """The options did not work. ``kinds``: what is not to be tried again in any value."""
        if self._search is not None:
            self._search.dropped.update(kinds)
            self._search.record(point, None)
        elif self._shape in self._memory:
            known = self._memory[self._shape]
            self._memory[self._shape] = known._replace(gains={**known.gains, point: None})

    def after_failure(self, now: float, left_requests: float) -> Change | None:
        """What comes next when the options of a trial did not work, and the best run again."""
        if self._search is None or self.is_done:
            return None
        return self._next(self._search, now, left_requests)

    @property
    def learned(self) -> Tuned | None:
        """What to remember; None: nothing yet."""
        if self._shape is None:
            return None
        if self._search is None:
            return self._memory.get(self._shape)
        gains = {DEFAULT: 1.0, **self._search.gains}
        return Tuned(self._shape, self.planned, gains, self._search.next() is None)

    def _is_measured(self, now: float, sample: Sample | None) -> bool:
        if self.is_trial and self._best is not None:
            late = (self._first_seconds or math.inf) * _LATE
            if now - self._full_since > late:
                return True
            if sample is not None and sample.rate < _HOPELESS * self._best.rate:
                return True
        return self._meter.parts >= _PARTS

    def _after_first(self, sample: Sample, now: float, left: float) -> Change | None:
        self._first_seconds = now - self._full_since
        copied = statistics.mean(self._copied) if self._copied else None
        shape = sample.shape(copied)
        self._best = sample
        known = self._remembered(shape)
        if self.point != DEFAULT and (known is None or known.best != self.point):
            # It began with what suits other work.
            point = DEFAULT if known is None else known.best
            if not self._is_worth(now, left, restarts=1):
                self.is_done = True
                return None
            self._shape = None if known is None else known.shape
            self.is_done = known is not None
            return Change(point, is_trial=False)
        if known is not None and (known.is_done or known.best != self.point):
            self._shape = known.shape
            self.is_done = known.is_done
            if known.best != self.point and self._is_worth(now, left, restarts=1):
                return Change(known.best, is_trial=False)
            if self.is_done:
                return None
        self._shape = shape if known is None else known.shape
        gains: dict[Point, float | None] = {DEFAULT: 1.0}
        if known is not None:
            gains |= known.gains
        self._search = Search(self._axes, sample, copied or 0.0, gains, self.point)
        return self._next(self._search, now, left)

    def _after_trial(
        self, search: Search, sample: Sample | None, now: float, left: float
    ) -> Change | None:
        best = self._best
        if best is None or not self.is_trial:
            # What was to be tried never ran: the engine was lost just then.
            return self._next(search, now, left)
        if sample is None:
            self._spent_seconds += now - self._full_since
            search.record(self.point, None)
        else:
            over_best = sample.rate / best.rate if sample.is_like(best) else 1.0
            self._spent_seconds += max(0.0, 1 - over_best) * (now - self._full_since)
            search.record(self.point, over_best, math.hypot(sample.error, best.error))
            if search.best == self.point:
                self._best = sample
        return self._next(search, now, left)

    def _next(self, search: Search, now: float, left: float) -> Change | None:
        point = search.next()
        if point is not None and self._is_worth(now, left):
            return Change(point, is_trial=True)
        change = self._end(search)
        return None if change.point == self.point else change

    def _end(self, search: Search) -> Change:
        self.is_done, self.is_trial = True, False
        return Change(search.best, is_trial=False)

    def _is_worth(self, now: float, left: float, restarts: int = 2) -> bool:
        """Whether restarts, there and back, are cheap beside the work."""
        assert self._best is not None  # noqa: S101 - something was measured
        whole = now - (self._first_at or 0.0) + left / self._best.per_second
        return self._spent_seconds + restarts * self._cost_seconds <= MOST_SPENT * whole

    def _remembered(self, shape: Shape) -> Tuned | None:
        near = [each for each in self._memory.values() if each.shape.distance(shape) <= 1]
        return min(near, key=lambda each: each.shape.distance(shape), default=None)


def copied_share(request: str, answer: str) -> float | None:
    """How many of an answer's groups of three words are in the request or earlier in the answer.

    None for an answer that is too short to tell.
    """
    words, seen = _words(answer), set(_grams(_words(request)))
    grams = list(_grams(words))
    if len(grams) < _GRAM:
        return None
    copied = 0
    for gram in grams:
        copied += gram in seen
        seen.add(gram)
    return copied / len(grams)


def words_of(point: Point) -> list[str]:
    """The options as a command line has them."""
    return [word for name, value in point for word in (f"--{name}", value)]


def written(point: Point) -> str:
    """The options as text; nothing for the engine's own."""
    return shlex.join(words_of(point))


def read_point(text: str) -> Point:
    """What :func:`written` has written. Raises ``ValueError`` for any other text."""
    words = shlex.split(text)
    names = [word.removeprefix("--") for word in words[::2]]
    return tuple(zip(names, words[1::2], strict=True))


def known_of(
    axes: Sequence[Axis], gains: Mapping[Point, float | None]
) -> dict[Point, float | None]:
    """What is known of points that these axes can have."""
    there = {(axis.name, value) for axis in axes for value in axis.values}
    return {point: gain for point, gain in gains.items() if there.issuperset(point)}


def _bucket(tokens: float) -> int:
    return round(math.log(max(1.0, tokens), 4))


def _are_near(one: float, another: float) -> bool:
    low, high = sorted((one, another))
    return high - low <= _LIKE_TOKENS or high <= _LIKE * low


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _grams(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(_GRAM)), strict=False)
