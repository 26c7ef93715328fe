"""Which lines of a batch that has ended are run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from batchyard.errors import RequestRefused, StorageError
from batchyard.lines.earlier import (
    STATUS_OF_CODE,
    Attempt,
    Earlier,
    earlier_of,
    with_earlier,
    without_earlier,
)
from batchyard.lines.framing import custom_id_of, parse_envelope, read_lines
from batchyard.results.answer_checks import OutputCheck, TooMuchToCheck, finish_reasons
from batchyard.results.results import Outcome, ResultLine, head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChoice:
    """A line is chosen if one of these holds.

    ``failed``: it is in the error file. ``codes``: it is there with such a code: that of its error,
    or of the engine's, with its type and the HTTP status. ``finish_reasons``: its answer ended so.
    ``invalid_json``: its answer is not JSON, or not of the schema that the request has.
    """

    failed: bool = False
    codes: frozenset[str] = frozenset()
    finish_reasons: frozenset[str] = frozenset()
    invalid_json: bool = False

    @property
    def looks_at_errors(self) -> bool:
        """Whether it may choose lines of the error file."""
        return self.failed or bool(self.codes)

    @property
    def looks_at_answers(self) -> bool:
        """Whether it may choose lines of the output file."""
        return self.invalid_json or bool(self.finish_reasons)

    def or_failed(self) -> LineChoice:
        """Itself, or all failed lines if it chooses nothing."""
        return self if self.looks_at_errors or self.looks_at_answers else ALL_FAILED


ALL_FAILED: Final = LineChoice(failed=True)


class _Error(msgspec.Struct, frozen=True):
    code: Any = None
    type: Any = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Result(msgspec.Struct, frozen=True):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


class _EngineError(msgspec.Struct, frozen=True):
    error: Any = None


_decode_result = msgspec.json.Decoder(_Result).decode
_decode_error = msgspec.json.Decoder(_EngineError).decode
_decode_any = msgspec.json.Decoder().decode


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file that passed validation, or that we have made."""
    with path.open("rb") as file:
        for physical in read_lines(file, path.stat().st_size):
            if physical.data:
                yield physical.data


def own_lines(source: Path, *, has_earlier: bool) -> Iterator[bytes]:
    """The lines of an input as its user wrote them. ``has_earlier``: they also say which batches
    have run them."""
    return map(without_earlier, lines_of(source)) if has_earlier else lines_of(source)


def chosen_lines(
    batch_id: str,
    source: Path,
    errors: Path | None,
    output: Path | None,
    choice: LineChoice,
    *,
    has_earlier: bool = False,
    are_asked_here: bool = True,
) -> Iterator[bytes]:
    """The input's lines that are chosen for what the two result files say of them.

    Lines that were left out because they are bad stay left out: they would be again. All files are
    in the order of the input, so one walk over them needs no memory of any.
    ``has_earlier`` as for :func:`own_lines`.
    ``are_asked_here``: the answers are to these lines, not to requests of a further stage. Raises
    :class:`~batchyard.errors.StorageError` where that is not so, and
    :class:`~batchyard.errors.RequestRefused` for schemas that take too long to check.
    """
    cursors = _cursors(errors, output, choice, are_asked_here=are_asked_here)
    for line in own_lines(source, has_earlier=has_earlier):
        if all(cursor.result is None for cursor in cursors):
            return
        cursor = _at(cursors, custom_id_of(line))
        if cursor is not None and cursor.result is not None:
            if cursor.wants(line, cursor.result):
                yield line
            cursor.advance()
    _check_end(batch_id, cursors)


class MergedLine(NamedTuple):
    """A line of the first batch. ``kept``: its result, if that stays."""

    line: bytes
    is_chosen: bool
    kept: ResultLine | None = None


def merged_lines(
    batch_id: str,
    source: Path,
    errors: Path | None,
    output: Path | None,
    choice: LineChoice,
    change: Callable[[bytes], bytes],
    *,
    has_earlier: bool,
) -> Iterator[MergedLine]:
    """All the input's lines. What is chosen is changed; of the others the results are kept.

    Each says which batches have run it (:mod:`batchyard.lines.earlier`); ``has_earlier``: they say
    so already. Raises what :func:`chosen_lines` does, and what ``change`` does.
    """
    cursors = _cursors(errors, output, choice)
    for found in lines_of(source):
        attempts = earlier_of(found).attempts if has_earlier else ()
        line = without_earlier(found) if has_earlier else found
        cursor = _at(cursors, custom_id_of(line))
        if cursor is None or cursor.result is None:
            # It is bad, and will be again; or the batch ended before any line had a result.
            changed = line if cursors else change(line)
            yield MergedLine(with_earlier(changed, Earlier(attempts)), is_chosen=not cursors)
            continue
        attempts = (*attempts, _attempt(batch_id, cursor.result, cursor.outcome))
        if cursor.wants(line, cursor.result):
            yield MergedLine(with_earlier(change(line), Earlier(attempts)), is_chosen=True)
        else:
            kept = ResultLine(cursor.outcome, cursor.line + b"\n")
            earlier = Earlier(attempts, is_kept=True)
            yield MergedLine(with_earlier(line, earlier), is_chosen=False, kept=kept)
        cursor.advance()
    _check_end(batch_id, cursors)


def _attempt(batch_id: str, result: _Result, outcome: Outcome) -> Attempt:
    if outcome is Outcome.OUTPUT:
        return Attempt(batch_id, "succeeded")
    if result.response is not None:
        said = _error_in(result.response)
        code = said.get("code") or said.get("type")
        return Attempt(batch_id, "failed", None if code is None else str(code))
    code = str(result.error.code) if result.error is not None else None
    return Attempt(batch_id, STATUS_OF_CODE.get(code or "", "failed"), code)


def _cursors(
    errors: Path | None, output: Path | None, choice: LineChoice, *, are_asked_here: bool = True
) -> list[_Cursor]:
    check = OutputCheck()

    def is_bad_answer(line: bytes, result: _Result) -> bool:
        # A request of a further stage is gone: what schema it had is not known.
        asked = line if are_asked_here else None
        return choice.looks_at_answers and _is_bad_answer(asked, result, choice, check)

    cursors = []
    if errors is not None:
        cursors.append(_Cursor(errors, Outcome.ERROR, lambda _, each: _is_failure(each, choice)))
    if output is not None:
        cursors.append(_Cursor(output, Outcome.OUTPUT, is_bad_answer))
    return cursors


def _at(cursors: list[_Cursor], custom_id: str) -> _Cursor | None:
    """The one whose next result is of this line."""
    for cursor in cursors:
        if cursor.result is not None and cursor.result.custom_id == custom_id:
            return cursor
    return None


def _check_end(batch_id: str, cursors: list[_Cursor]) -> None:
    if any(cursor.result is not None for cursor in cursors):
        raise StorageError(
            f"A result file of {batch_id} names a request that its input file lacks, or in another "
            "order: one of the two was changed in the object store."
        )


class _Cursor:
    """A result file on the way; ``result`` is the next line, None at the end."""

    def __init__(
        self, path: Path, outcome: Outcome, wants: Callable[[bytes, _Result], bool]
    ) -> None:
        self.outcome, self.wants = outcome, wants
        self._lines = (line for line in lines_of(path) if head_of(line).refused is None)
        self.line = b""
        self.result: _Result | None = None
        self.advance()

    def advance(self) -> None:
        self.line = next(self._lines, b"")
        self.result = _decode_result(self.line) if self.line else None


def _is_failure(result: _Result, choice: LineChoice) -> bool:
    return choice.failed or not choice.codes.isdisjoint(_codes(result))


def _codes(result: _Result) -> set[str]:
    if result.response is None:
        return {str(result.error.code)} if result.error is not None else set()
    error = _error_in(result.response)
    found = {str(error[key]) for key in ("code", "type") if error.get(key)}
    return {str(result.response.status_code), *found}


def _error_in(response: _Response) -> dict[str, Any]:
    """What the engine says went wrong."""
    try:
        error = _decode_error(response.body).error
    except (ValueError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _is_bad_answer(
    line: bytes | None, result: _Result, choice: LineChoice, check: OutputCheck
) -> bool:
    """``line``: of the request; None: it is not known."""
    if result.response is None:
        return False
    try:
        answer = _decode_any(result.response.body)
    except (ValueError, RecursionError):
        # Its JSON is well-formed, but nested too deeply, or a number in it is too large.
        return choice.invalid_json
    if not choice.finish_reasons.isdisjoint(finish_reasons(answer)):
        return True
    if not choice.invalid_json:
        return False
    body = b"{}" if line is None else bytes(parse_envelope(line).body)
    try:
        return check.fault_of(body, answer) is not None
    except TooMuchToCheck:
        raise RequestRefused(
            "The requests' schemas take too long to check: choose lines in another way.",
            param="invalid_json",
            code="schema_too_large",
        ) from None
