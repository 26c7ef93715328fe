"""What a token of a prompt costs an engine, measured in tokens of answers.

While an answer is written, the engine also reads the prompts of the requests that get a seat in
the meantime, and the more it reads, the longer a token of the answer takes. So the seconds of an
answer are a line over its own tokens and the prompt tokens that were read meanwhile. Short answers
behind many prompts, and long ones behind few, tell the two slopes apart.
"""

from __future__ import annotations

from typing import Final

from batchyard.plan.lengths import PROMPT_WORK

_HORIZON_ANSWERS: Final = 2000
"""The weight of an answer fades to a third with as many later ones."""
_DOUBT: Final = 1200.0
"""How much evidence weighs as much as what was believed before: so many tokens of answers during
each of which every seat reads one prompt token more than usual. Answers of one moment share its
noise, so this is thirty times what independent ones would ask for."""
_MOST: Final = 4.0
"""A prompt token is hardly more work than one of an answer. But the plan takes four bytes for one,
and a token of another script may have fewer."""


class PromptCost:
    """Counts answers. ``believed`` is the weight before any: of earlier runs, or a guess."""

    def __init__(self, believed: float = PROMPT_WORK) -> None:
        self.believed = believed
        self._tokens = self._read = self._read_squared = 0.0
        self._seconds = self._seconds_by_read = self._busy = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether any answer was counted."""
        return self._tokens > 0

    def count(self, tokens: int, seconds: float, *, read: float, busy: int) -> None:
        """Count an answer of so many ``tokens``, which took ``seconds`` from its seat on.

        ``read``: tokens of prompts of requests that got a seat meanwhile, its own among them.
        ``busy``: how many seats are taken.
        """
        kept = 1 - 1 / _HORIZON_ANSWERS
        # By the token: a long answer averages over as many steps.
        self._tokens = kept * self._tokens + tokens
        self._read = kept * self._read + read
        self._read_squared = kept * self._read_squared + read * read / tokens
        self._seconds = kept * self._seconds + seconds
        self._seconds_by_read = kept * self._seconds_by_read + seconds * read / tokens
        self._busy = kept * self._busy + busy * tokens

    @property
    def weight(self) -> float:
        """Tokens of answers that a token of a prompt costs."""
        if not self._busy:
            return self.believed
        # Least squares, with what was believed as one more observation: slope of the prompts, less
        # its share of the slope of the tokens, is 0. A step writes a token for each busy seat.
        busy = self._busy / self._tokens
        share, doubt = self.believed / busy, _DOUBT * busy * busy
        tokens, squares = self._tokens + doubt * share * share, self._read_squared + doubt
        both = self._read - doubt * share
        by_token = self._seconds * squares - self._seconds_by_read * both
        by_read = self._seconds_by_read * tokens - self._seconds * both
        if by_token <= 0:
            return self.believed
        return min(_MOST, max(0.0, busy * by_read / by_token))
