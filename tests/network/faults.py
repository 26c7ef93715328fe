"""What a proxy of this folder does to one exchange, and to which one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Wrong(StrEnum):
    """How an exchange goes wrong."""

    REQUEST_LOST = "request lost"
    """The server never gets it; the connection is closed."""
    ANSWER_LOST = "answer lost"
    """The server has done what was asked; the connection is closed in place of its answer."""
    DELAYED = "answer delayed"
    """The answer comes some seconds later."""
    REQUEST_CUT = "request cut"
    """The server gets the first half of it, then the connection is closed."""
    ANSWER_CUT = "answer cut"
    """The client gets the first half of the answer, then the connection is closed."""
    TWICE = "request twice"
    """The server gets it twice, one after the other; the client gets the second answer."""
    LISTED_LATE = "listed late"
    """The answer is a listing of a bucket without the objects of the last seconds."""
    REFUSED = "slow down"
    """503, and the server is not asked."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, for the ``nth`` exchange of those whose text ``matches``.

    The text of an HTTP request is its method and target, ``PUT /bucket/key``, and, where the proxy
    shows bodies, its body in the next line; that of a statement is its SQL; that of a ``COMMIT`` is
    the word and, line by line, the statements before it.
    """

    wrong: Wrong
    matches: str = ""
    nth: int = 1
    seconds: float = 3.0
    """Of a delay, or the age of what a late listing knows."""
    body_bytes: int | None = None
    """Of a cut answer: how much of its body passes; None: half of it."""


@dataclass(slots=True)
class Faults:
    """Those that have not happened yet, and how often each was passed by."""

    waiting: list[Fault] = field(default_factory=list)
    happened: list[tuple[Fault, str]] = field(default_factory=list)
    """With the text of the exchange."""
    in_turn: Iterator[Fault | None] | None = None
    """In place of those that wait: one for each exchange, until there are no more."""
    texts: list[str] = field(default_factory=list)
    """Of all exchanges, in the order in which they began."""
    _seen: dict[Fault, int] = field(default_factory=dict)

    def take(self, text: str) -> Fault | None:
        """The fault that is for this exchange, which has now happened; None: it goes well."""
        self.texts.append(text)
        if self.in_turn is not None:
            return next(self.in_turn, None)
        found = None
        for fault in list(self.waiting):
            if not re.search(fault.matches, text, re.DOTALL):
                continue
            self._seen[fault] = self._seen.get(fault, 0) + 1
            if found is None and self._seen[fault] >= fault.nth:
                found = fault
        if found is not None:
            self.waiting.remove(found)
            self.happened.append((found, text))
        return found

    def give_back(self, fault: Fault) -> None:
        """It did not happen: the server failed of itself, and will be asked again."""
        self.waiting.append(fault)
        self.happened = [each for each in self.happened if each[0] is not fault]
