"""The chunks that a plan is cut into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClassShare(NamedTuple):
    """What a chunk has of one class: requests to run, and the tokens of their expected answers."""

    runs: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A contiguous range of plan records. Chunks run in the order of ``index``."""

    index: int
    first_record: int
    request_count: int
    token_estimate: int
    prompt_tokens: int = 0
    prompt_work: float = 0.0
    """See :func:`.prompt_work`."""
    outputs: Mapping[int, ClassShare] = field(default_factory=dict)
    """The share of each class, under the number of the class."""
