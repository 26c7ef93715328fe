"""Which chunk of a batch a runner takes, so that each engine has a range of the prefix tree. Pure.

A batch's chunks are in prefix order. A runner goes on where it is; its engine has in its cache what
comes next. One that comes to a batch where others are begins in the middle of what is left of the
largest range, and so does one whose own range is done: no engine is idle while a chunk is free.

Where lengths of answers were learned, all of this is about the chunks with the longest ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a batch, whatever has become of it. ``owner`` is its runner, or was the last.

    ``is_held``: the owner is at it now. ``answer_bits``: see :func:`batchyard.lengths.answer_bits`.
    """

    index: int
    first_record: int
    request_count: int
    tokens: int
    is_free: bool
    is_held: bool
    owner: str | None
    answer_bits: int = 0


def choose(pieces: Sequence[Piece], owner: str, *, place: int | None = None) -> Piece | None:
    """The piece that is the owner's next, of all of a batch in their order; None: none is free.

    ``place`` is a record that the engine's cache is warm for, from another batch.
    """
    free = _of_longest_answers([piece for piece in pieces if piece.is_free])
    if not free:
        return None
    if place is not None:
        after = [each for each in free if each.first_record + each.request_count > place]
        return min(after or free, key=lambda each: each.first_record)
    runs = _runs(pieces, _large(free))
    own = [run for before, run in runs if before is not None and before.owner == owner]
    if own:
        return own[0][0]
    at_work = {piece.owner for piece in pieces if piece.is_held}
    to_begin = [
        _second_half(run) if before is not None and before.owner in at_work else run
        for before, run in runs
    ]
    return max(to_begin, key=_tokens)[0]


def _of_longest_answers(free: Sequence[Piece]) -> list[Piece]:
    """They go first, on any runner, so that none is begun at the end."""
    most = max((piece.answer_bits for piece in free), default=0)
    return [piece for piece in free if piece.answer_bits == most]


def _large(free: Sequence[Piece]) -> set[int]:
    """The small ones at a plan's end are left for the end, when engines run out of work."""
    most = max(piece.tokens for piece in free)
    return {piece.index for piece in free if 2 * piece.tokens > most}


def _runs(pieces: Sequence[Piece], wanted: set[int]) -> list[tuple[Piece | None, list[Piece]]]:
    """What lies side by side of the wanted ones, each with the piece before it."""
    before = {piece.index: last for last, piece in pairwise(pieces)}
    groups = groupby(pieces, key=lambda piece: piece.index in wanted)
    runs = [list(group) for is_wanted, group in groups if is_wanted]
    return [(before.get(run[0].index), run) for run in runs]


def _second_half(run: list[Piece]) -> list[Piece]:
    """From the piece in the middle on: the runner before the run continues with the first half."""
    half, seen = _tokens(run) / 2, 0
    for number, piece in enumerate(run):
        if seen >= half:
            return run[number:]
        seen += piece.tokens
    return run[-1:]


def _tokens(run: Sequence[Piece]) -> int:
    return sum(piece.tokens for piece in run)
