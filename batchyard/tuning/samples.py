"""How fast an engine is, by the answers that it gives while it is full."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final, NamedTuple

from batchyard.tuning.shapes import Shape

LEAST_PART_ANSWERS: Final = 48
"""Each part has as many answers as the engine has seats, and no fewer than that."""
LEAST_PART_SECONDS: Final = 10.0
_LIKE: Final = 1.5
_LIKE_TOKENS: Final = 16
"""Samples whose requests differ by more are not compared."""
_PROMPT_WORK: Final = 1 / 8
"""A token of a prompt is read together with many others, one of an answer is a step."""


class Answered(NamedTuple):
    """Tokens of one answered request."""

    computed_prompt: int
    """Of its prompt, what the cache did not have."""
    cached: int
    output: int


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

    def __init__(self, seats: int, part_seconds: float | None = None) -> None:
        self._fill_answers = seats
        self._part_answers = max(LEAST_PART_ANSWERS, seats)
        self._part_seconds = LEAST_PART_SECONDS if part_seconds is None else part_seconds
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


def _are_near(one: float, another: float) -> bool:
    low, high = sorted((one, another))
    return high - low <= _LIKE_TOKENS or high <= _LIKE * low
