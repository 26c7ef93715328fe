"""What the lines of a file are checked against: limits, and what an operator allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batchyard.lines.json_depth import MAX_DEPTH
from batchyard.lines.offer import ANYTHING, Offer

if TYPE_CHECKING:
    from batchyard.lines.body_policy import BodyPolicy

_MOST_REQUESTS: Final = 2**32 - 1
"""A plan numbers its requests with 32 bits."""
_MOST_BYTES: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What one input file may hold. Defaults are the OpenAI Batch API's where it has one."""

    max_requests: int = 50_000
    max_bytes: int = 200 * 1024**2
    max_line_bytes: int = 32 * 1024**2
    max_embedding_inputs: int = 50_000
    max_custom_id_chars: int = 512
    max_depth: int = MAX_DEPTH
    max_reported_errors: int = 100

    def of_any_size(self) -> Limits:
        """The same for a file of the operator, which may be as large as there is room for."""
        return replace(
            self,
            max_requests=_MOST_REQUESTS,
            max_bytes=_MOST_BYTES,
            max_embedding_inputs=_MOST_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """What the lines of one batch must agree on.

    ``endpoint``: the one that every line names, or ``None`` where a file may mix them.
    ``models``: the models on offer, or ``None`` where any name goes through to the engine.
    ``one_model``: every line names the same one, or an adapter of it.
    ``offer``: what engines serve, with the model of each adapter.
    ``policy``: what bodies may hold beyond that; ``None``: whatever the engine takes.
    ``is_rendered``: a template has made them of rows, and some say that it could not.
    ``merges``: some have an answer already, and say so (:mod:`.earlier`); the limit of a line's
    bytes has room for that.
    """

    endpoint: str | None
    models: frozenset[str] | None = None
    one_model: bool = True
    offer: Offer = ANYTHING
    limits: Limits = Limits()
    policy: BodyPolicy | None = None
    is_rendered: bool = False
    merges: bool = False
