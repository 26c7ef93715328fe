"""What went wrong with a line of an error file, and how many lines failed alike. Pure.

Lines are alike that have the same status and code. The engine chooses the message, which may quote
a prompt, so only codes are counted and stored; messages are read from the error file, where it may
be read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CODE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MOST_CODES: Final = 20
_MOST_COUNTED: Final = 1_000
"""So many codes are told apart while lines are counted: an engine may invent one for each line."""
_OTHER: Final = "other"
_UNREADABLE: Final = "unreadable"
_MOST_NAMED: Final = 3
_decode = msgspec.json.Decoder().decode


class LineError(NamedTuple):
    """``code`` is ``503 server_error`` or, without an HTTP answer, ``request_timeout``."""

    code: str
    message: str


class ErrorCount(msgspec.Struct, frozen=True):
    """How many lines of an error file have this code."""

    code: str
    count: int


class ErrorCounter:
    """Counts the lines of an error file by their codes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, lines: Iterable[bytes]) -> None:
        """Count these lines."""
        for line in lines:
            code = error_of(line).code
            is_known = code in self._counts or len(self._counts) < _MOST_COUNTED
            self._counts[code if is_known else _OTHER] += 1

    def counts(self) -> tuple[ErrorCount, ...]:
        """The commonest first. Those of rare codes are together the last one, ``other``."""
        rare = self._counts.pop(_OTHER, 0)
        common = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))
        rare += sum(count for _, count in common[_MOST_CODES:])
        self._counts[_OTHER] = rare
        named = [ErrorCount(code, count) for code, count in common[:_MOST_CODES]]
        return (*named, ErrorCount(_OTHER, rare)) if rare else tuple(named)


def error_of(line: bytes) -> LineError:
    """The error of a line: ours, or that of the engine's answer; an engine may answer anything."""
    try:
        found: defaultdict[str, Any] = defaultdict(lambda: None, _decode(line))
    except (ValueError, TypeError, RecursionError):
        return LineError(_UNREADABLE, "")
    response, error = found["response"], found["error"]
    status = ""
    if isinstance(response, dict):
        status = str(response.get("status_code", ""))
        body = response.get("body")
        error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return LineError(status or "error", str(error))
    code, kind = error.get("code"), error.get("type")
    # Engines write the status there.
    name = str((kind if not code or str(code) == status else code) or "")
    if not _CODE.fullmatch(name):
        name = ""
    return LineError(f"{status} {name}".strip() or "error", str(error.get("message", "")))


def count_words(counts: Sequence[ErrorCount]) -> str:
    """The commonest, without any text of an engine: ``63 × 503 server_error, 2 × 400``."""
    named = [f"{each.count:,} × {each.code}" for each in counts[:_MOST_NAMED]]
    if rest := sum(each.count for each in counts[_MOST_NAMED:]):
        named.append(f"{rest:,} with other errors")
    return ", ".join(named)
