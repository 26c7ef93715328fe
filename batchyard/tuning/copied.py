"""How much of answers is copied: what guesses of the next tokens can gain."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GRAM: Final = 3


def copied_share(request: str, answer: str) -> float | None:
    """How many of an answer's groups of three words are in the request or earlier in the answer.

    None for an answer that is too short to tell.
    """
    words, seen = _words(answer), set(_grams(_words(request)))
    grams = list(_grams(words))
    if len(grams) < _GRAM:
        return None
    copied = 0
    for gram in grams:
        copied += gram in seen
        seen.add(gram)
    return copied / len(grams)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _grams(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(_GRAM)), strict=False)
