"""Up to where a client has read the results of a batch: a short text that it need not understand.

It has no state on the server, so it is valid in every process and after every restart, as long as
the results are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchyard.errors import RequestRefused

Order: TypeAlias = Literal["completion", "input"]

_CURSOR = re.compile(r"(?:c([0-9]{1,10})\.([0-9]{1,10})|i([0-9]{1,10}))")


@dataclass(frozen=True, slots=True)
class CompletionCursor:
    """The first ``found`` lines in the order of completion, and ``rest`` of all others.

    The others are read once the batch has ended, from its files. So ``found`` stays as it is from
    then on, whatever other readers still find.
    """

    found: int = 0
    rest: int = 0

    def __str__(self) -> str:
        return f"c{self.found}.{self.rest}"


@dataclass(frozen=True, slots=True)
class InputCursor:
    """The lines of the first ``requests`` of the input."""

    requests: int = 0

    def __str__(self) -> str:
        return f"i{self.requests}"


Cursor: TypeAlias = CompletionCursor | InputCursor


def parse_cursor(text: str | None, order: Order | None) -> Cursor:
    """The cursor that the text is; None: the beginning, by default of the order of completion.

    Raises :class:`~batchyard.errors.RequestRefused` for no cursor, and for one of another order.
    """
    if not text:
        return InputCursor() if order == "input" else CompletionCursor()
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise _refused("'after' must be what an earlier answer has in X-Next-After.")
    found, rest, requests = match.groups()
    if order is not None and (order == "input") != (requests is not None):
        raise _refused("'after' belongs to the other order: do not change 'order'.")
    if requests is not None:
        return InputCursor(int(requests))
    return CompletionCursor(int(found), int(rest))


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="after", code="invalid_value")
