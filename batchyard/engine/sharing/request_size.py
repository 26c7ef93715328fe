"""How many tokens a request will be, prompt and answer, by what is seen without a tokenizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.engine.base import EngineRequest

_BYTES_PER_TOKEN: Final = 4
_UNKNOWN: Final = 256
"""Output tokens of a request that names no limit."""
_MOST_INPUT: Final = 32_768
_MOST_OUTPUT: Final = 4_096
_LIMIT = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})')


def expected_tokens(request: EngineRequest) -> float:
    """A guess from the length of its body and from the most that it asks for.

    Bounded: an image in the body, or a limit that no answer reaches, is not taken for as many
    tokens.
    """
    limits = _LIMIT.findall(request.body)
    output = int(limits[-1]) if limits else _UNKNOWN
    return min(len(request.body) / _BYTES_PER_TOKEN, _MOST_INPUT) + min(output, _MOST_OUTPUT)
