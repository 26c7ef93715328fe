"""Work that is alike, and what is remembered of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.tuning.points import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.tuning.points import Point

COPIED_STEP: Final = 0.25
"""A shape's share of copied words is known to within that."""


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
            None if copied is None else round(copied / COPIED_STEP),
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


def _bucket(tokens: float) -> int:
    return round(math.log(max(1.0, tokens), 4))
