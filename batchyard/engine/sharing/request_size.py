"""How many tokens a request will be, or was, by what is seen without a tokenizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from batchyard.plan.lengths import PROMPT_WORK
from batchyard.results.results import usage_of

if TYPE_CHECKING:
    from batchyard.engine.base import EngineAnswer, EngineRequest

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


def work_of(answer: EngineAnswer) -> float | None:
    """What the engine did for it, in tokens of answers; 0: it does not say; None: it is an error.

    It counts what the server calls tokens, and a prompt by a fixed weight.
    """
    if answer.status is None or not 200 <= answer.status < 300:
        return None
    usage = usage_of(answer.body)
    return usage.output_tokens + PROMPT_WORK * max(0, usage.input_tokens - usage.cached_tokens)
