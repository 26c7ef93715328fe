"""The options that an engine may be given, and how they are written."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Point = tuple[tuple[str, str], ...]
"""Options and their values, in the order of their names, which the engine gets besides its own."""
DEFAULT: Final[Point] = ()


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
