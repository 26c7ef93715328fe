"""How many tokens a request will be, prompt and answer, by what is seen without a tokenizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.engine.base import EngineRequest

_BYTES_PER_TOKEN: Final = 4
_UNKNOWN: Final = 256
"""Output tokens of a request that names no limit."""
_LIMIT = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})')


def expected_tokens(request: EngineRequest) -> float:
    """A guess from the length of its body and from the most that it asks for."""
    limits = _LIMIT.findall(request.body)
    output = int(limits[-1]) if limits else _UNKNOWN
    return len(request.body) / _BYTES_PER_TOKEN + output
