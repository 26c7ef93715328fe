"""A program: joins a batch's results to its rows.

The input, both result files and the rows are in one order, so one walk over them needs no memory
of any. A row without an answer keeps its place.
"""

from __future__ import annotations

import base64
import struct
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from batchyard.datasets.jobs import TABLE_FILE, JoinJob
from batchyard.datasets.program import done
from batchyard.datasets.tables import Refused, RowsWriter, read_rows, schema_of
from batchyard.lines.earlier import STATUS_OF_CODE, earlier_of
from batchyard.lines.framing import custom_id_of, read_lines
from batchyard.results.answer_checks import finish_reasons, text_of
from batchyard.results.results import head_of, usage_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.processes.child_loop import Answers

_PART_ROWS: Final = 1024
_PART_BYTES: Final = 16 * 1024**2
_CUSTOM_ID: Final = "custom_id"
_COLUMNS: Final = {
    _CUSTOM_ID: pa.string(),
    "status": pa.string(),
    "content": pa.string(),
    "finish_reason": pa.string(),
    "input_tokens": pa.int64(),
    "output_tokens": pa.int64(),
    "error_code": pa.string(),
    "error_message": pa.string(),
    "response": pa.large_string(),
}
_EMBEDDING: Final = {"embedding": pa.list_(pa.float32())}
_ATTEMPT: Final = {"batch_id": pa.string(), "status": pa.string(), "error_code": pa.string()}
_HISTORY: Final = {"history": pa.list_(pa.struct(_ATTEMPT))}
"""Of a retry that merges: the batches that have run the line, the oldest first."""
_decode = msgspec.json.Decoder().decode


def answers(requests: Iterator[bytes]) -> Answers:
    """The answer to the one :class:`~.jobs.JoinJob`."""
    return done(JoinJob, main, requests)


def main(job: JoinJob) -> None:
    """Raises :class:`Refused`, and ``OSError``."""
    columns = _COLUMNS | (_EMBEDDING if job.has_embeddings else {})
    columns |= _HISTORY if job.merged_by is not None else {}
    of_rows = schema_of([Path(job.rows)]) if job.rows is not None else pa.schema([])
    if _CUSTOM_ID in of_rows.names:
        # The row's own is the same.
        columns = {name: kind for name, kind in columns.items() if name != _CUSTOM_ID}
    names = _free_names(columns, of_rows.names)
    ours = (pa.field(names[name], columns[name]) for name in columns)
    schema = pa.schema([*of_rows, *ours], of_rows.metadata)
    of_results = pa.schema(columns)
    rows = _Rows(job)
    with RowsWriter(Path(TABLE_FILE), schema) as table:
        for part in _results(job):
            results = pa.RecordBatch.from_pylist(part, of_results)
            for piece in rows.joined_to(results):
                table.add(pa.RecordBatch.from_arrays(piece, schema=schema))
    rows.check_end()


class _Rows:
    """The rows, in the pieces in which they are read: together they may not fit into memory."""

    def __init__(self, job: JoinJob) -> None:
        self._batches = iter(()) if job.rows is None else read_rows([Path(job.rows)])
        self._rest: pa.RecordBatch | None = None
        self._has_rows = job.rows is not None

    def joined_to(self, results: pa.RecordBatch) -> Iterator[list[Any]]:
        """The columns of the next rows and those of their results, a piece at a time.

        Raises :class:`Refused` where there are fewer rows than results.
        """
        if not self._has_rows:
            yield results.columns
            return
        while results.num_rows:
            rows = self._rest if self._rest is not None else next(self._batches, None)
            if rows is None:
                raise _changed()
            number = min(rows.num_rows, results.num_rows)
            self._rest = rows.slice(number) if rows.num_rows > number else None
            yield [*rows.slice(0, number).columns, *results.slice(0, number).columns]
            results = results.slice(number)

    def check_end(self) -> None:
        """Refuse rows without a line."""
        if self._rest is not None or next(self._batches, None) is not None:
            raise _changed()


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Line(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


class _Cursor:
    """A result file on the way. ``head`` says whose the next line is; None at the end."""

    def __init__(self, path: str, *, is_output: bool) -> None:
        self.is_output = is_output
        self._lines = _lines_of(path)
        self.advance()

    def advance(self) -> None:
        self.line = next(self._lines, b"")
        self.head = head_of(self.line) if self.line else None

    def is_at(self, ordinal: int, custom_id: str) -> bool:
        """Whether the next line is that request's."""
        if self.head is None:
            return False
        if self.head.refused is not None:
            return self.head.refused == ordinal
        return self.head.name == custom_id


def _results(job: JoinJob) -> Iterator[list[dict[str, Any]]]:
    """The result columns of all lines, in parts."""
    cursors = [
        _Cursor(path, is_output=is_output)
        for path, is_output in ((job.output, True), (job.error, False))
        if path is not None
    ]
    part: list[dict[str, Any]] = []
    size = 0
    for ordinal, line in enumerate(_lines_of(job.lines)):
        custom_id = custom_id_of(line)
        result = _none(custom_id)
        for cursor in cursors:
            if cursor.is_at(ordinal, custom_id):
                size += len(cursor.line)
                result = _columns_of(custom_id, cursor.line, is_output=cursor.is_output)
                cursor.advance()
                break
        if job.merged_by is not None:
            result["history"] = _history(line, job.merged_by, result)
        part.append(result)
        if len(part) == _PART_ROWS or size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
    if any(cursor.head is not None for cursor in cursors):
        raise _changed()


def _none(custom_id: str) -> dict[str, Any]:
    message = "The result files have no line of this request."
    found = {"status": "failed", "error_code": "no_result", "error_message": message}
    return {_CUSTOM_ID: custom_id or None, **found}


def _columns_of(custom_id: str, line: bytes, *, is_output: bool) -> dict[str, Any]:
    found = _decode_line(line)
    made: dict[str, Any] = {_CUSTOM_ID: custom_id or None}
    body = b"" if found.response is None else bytes(found.response.body)
    answer = _answer_of(body)
    if body:
        made["response"] = body.decode()
    if is_output:
        usage = usage_of(body)
        return made | {
            "status": "succeeded",
            "content": _content_of(answer),
            "finish_reason": next(iter(sorted(finish_reasons(answer))), None),
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "embedding": _embedding_of(answer),
        }
    code, message = _error_of(found.error, answer)
    status = STATUS_OF_CODE.get(code or "", "failed") if found.response is None else "failed"
    return made | {"status": status, "error_code": code, "error_message": message}


def _history(line: bytes, batch_id: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    earlier = earlier_of(line)
    attempts = [msgspec.to_builtins(each) for each in earlier.attempts]
    if not earlier.is_kept:
        own = {"status": result["status"], "error_code": result.get("error_code")}
        attempts.append({"batch_id": batch_id, **own})
    return attempts


def _answer_of(body: bytes) -> Any:
    """The body's value; None for what only looks like JSON: it stays the line's own trouble."""
    try:
        return _decode(body)
    except (ValueError, RecursionError):
        return None


def _content_of(answer: Any) -> str | None:
    """The text of the first choice, or of a recording. A choice that calls a tool has none."""
    if isinstance(answer, dict) and isinstance(answer.get("text"), str):
        return str(answer["text"])
    return text_of(answer)


def _embedding_of(answer: Any) -> list[float] | None:
    """That of the first input; None where there is none."""
    try:
        found = answer["data"][0]["embedding"]
        if isinstance(found, str):
            data = base64.b64decode(found)
            return list(struct.unpack(f"<{len(data) // 4}f", data))
        return [float(each) for each in found]
    except (LookupError, TypeError, ValueError, OverflowError, struct.error):
        return None


def _error_of(error: _Error | None, answer: Any) -> tuple[str | None, str | None]:
    """Of a line without an answer its own; else what the engine says."""
    if error is not None:
        return error.code, error.message
    said = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(said, dict):
        return None, None
    code = said.get("code") or said.get("type")
    message = said.get("message")
    return (None if code is None else str(code)), (None if message is None else str(message))


def _free_names(columns: dict[str, Any], taken: list[str]) -> dict[str, str]:
    """The result columns' names in the table: the rows' own columns keep theirs."""
    names: dict[str, str] = {}
    for name in columns:
        tries = (f"{'result_' * each}{name}" for each in count())
        names[name] = next(each for each in tries if each not in taken)
    return names


def _lines_of(name: str) -> Iterator[bytes]:
    path = Path(name)
    with path.open("rb") as file:
        for physical in read_lines(file, path.stat().st_size):
            if physical.data:
                yield physical.data


def _changed() -> Refused:
    words = "The rows, the input and the result files do not fit together: one was changed."
    return Refused("invalid_dataset", words)
