"""How a chunk runs after errors in it and crashes of its runners. Pure; see ADR 20.

A *strike* is an error that ended a lease: the chunk is certainly its cause. A *death* is an owner
that vanished with the lease. It may have any cause, so the first deaths do not count, and later
ones only if the runner had no other chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.store.tables.chunk import ALONE_DEATHS, SINGLE_DEATHS, SINGLE_STRIKES

if TYPE_CHECKING:
    from batchyard.store import ChunkLease

_LARGEST_GROUP: Final = 64
NARROWING: Final = 8
"""As after a crash of the engine, ADR 11. When this many groups have run, all requests that ran
together at the last failure have run again, and none is a suspect."""
_TRIES_ALONE: Final = 2
"""A line that ran by itself in this many failures is not run again."""
_FIRST_GIVEN_UP: Final = SINGLE_STRIKES + _TRIES_ALONE
LAST_LEVEL: Final = _FIRST_GIVEN_UP + 3
"""At this level every remaining line gets its error line; at each level before, eight times as
many as at the last."""


def level_of(lease: ChunkLease) -> int:
    """How much the chunk is suspected; 0 and 1: it runs like any other."""
    return max(lease.strikes, lease.deaths - (SINGLE_DEATHS - SINGLE_STRIKES))


def runs_alone(lease: ChunkLease) -> bool:
    """Whether the runner must hold no other chunk, so that a crash has one suspect."""
    return lease.deaths >= ALONE_DEATHS


def group_size_of(lease: ChunkLease) -> int | None:
    """How many of the chunk's requests run together, in the plan's order; None: no limit."""
    level = level_of(lease)
    return max(1, _LARGEST_GROUP // NARROWING ** (level - 2)) if level >= 2 else None


def given_up_of(lease: ChunkLease, left: int) -> int:
    """How many of the ``left`` requests are not run again: the first ones in the plan's order."""
    level = level_of(lease)
    if level < _FIRST_GIVEN_UP:
        return 0
    return left if level >= LAST_LEVEL else min(left, NARROWING ** (level - _FIRST_GIVEN_UP))


def given_up_words(lease: ChunkLease) -> str:
    """What the error line of such a request says."""
    if lease.deaths > lease.strikes:
        return f"The process that ran this request ended {lease.deaths} times."
    return f"Batchyard failed {lease.strikes} times as it ran this request."
