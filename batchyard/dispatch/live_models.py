"""Live models are to have a runner without any chunk, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.store import ModelDemand

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_NEVER: Final = 2**53
"""A time after every deadline, in Unix seconds."""


def with_live(demand: Sequence[ModelDemand], live: Collection[str] | None) -> Sequence[ModelDemand]:
    """``demand``, and the live models that have no chunks, which are wanted all the same."""
    missing = sorted(set(live or ()) - {entry.model for entry in demand})
    return [*demand, *map(_without_chunks, missing)]


def _without_chunks(model: str) -> ModelDemand:
    return ModelDemand(
        model=model,
        free_chunks=0,
        leased_chunks=0,
        remaining_tokens=0.0,
        answered=0,
        deadline=_NEVER,
    )
