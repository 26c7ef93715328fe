"""A program: turns rows into request lines.

The lines are parts of its answer as they are made, and the rows, as they were read, to a Parquet
file in the working folder. A row that makes no body becomes a line that says why: the validator
takes it for a bad one. Templates are the clients', so each row has a limit of processor time; where
the interpreter does not come to stop it, in one long call, the kernel ends the process.
"""

from __future__ import annotations

import re
import resource
import signal
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from jinja2 import TemplateError, meta

from batchyard.datasets.jobs import ROWS_FILE, RenderJob
from batchyard.datasets.json_rows import JsonLines, Row, UnusableRow
from batchyard.datasets.program import done
from batchyard.datasets.tables import (
    Refused,
    RowsWriter,
    in_columns,
    is_json_lines,
    read_rows,
    schema_of,
)
from batchyard.datasets.values import type_without_meaning, values_of
from batchyard.lines.lines import TEMPLATE_ERROR
from batchyard.lines.templates import new_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jinja2 import Template

    from batchyard.processes.child_loop import Answers

ROW_SECONDS: Final = 1.0
"""Of processor time, for one row; thousands of rows take as long."""
_COMPILE_SECONDS: Final = 2.0
_STUCK_SECONDS: Final = 3
"""After so many in one row, the kernel ends the process."""
_BLOCK_BYTES: Final = 1 << 16
_CUSTOM_ID: Final = "custom_id"
_ROW: Final = "row"
_SOURCE_NAME: Final = "<template>"
_QUOTED: Final = re.compile(r"'([^']*)'")
_encode = msgspec.json.encode
_decode = msgspec.json.Decoder().decode


class _RowFailed(Exception):
    """The row makes no body: a code and a message without anything of the row."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


class _TooSlow(BaseException):
    """Not an ``Exception``, which a filter might catch."""


def answers(requests: Iterator[bytes]) -> Answers:
    """The answer to the one :class:`~.jobs.RenderJob`: its lines, in blocks."""
    signal.signal(signal.SIGPROF, _stop)
    return done(RenderJob, main, requests)


def main(job: RenderJob) -> Iterator[bytes]:
    """Raises :class:`Refused`, and ``OSError``."""
    schema, pieces = _opened([Path(each) for each in job.files])
    renderer = Renderer(job, schema)
    with RowsWriter(Path(ROWS_FILE), schema) as rows:
        number = 0
        for batch, written in pieces:
            rows.add(batch)
            values = renderer.values(written) if isinstance(written, pa.RecordBatch) else written
            yield from _blocks(renderer.lines(values, number + 1))
            number += batch.num_rows
            if number > job.most_rows:
                # The validator refuses it for that.
                break


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines, many together."""
    block = bytearray()
    for line in lines:
        block += line
        if len(block) >= _BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _opened(
    files: Sequence[Path],
) -> tuple[pa.Schema, Iterable[tuple[pa.RecordBatch, pa.RecordBatch | Sequence[Row]]]]:
    """The columns of all files, and the rows in pieces: in these columns, and as they are written.

    A template gets the latter: a number is not a text because another file has texts there.
    """
    are_lines = [is_json_lines(each) for each in files]
    if all(are_lines):
        lines = JsonLines(files)
        return lines.schema, lines.pieces()
    if any(are_lines):
        other = files[are_lines.index(not are_lines[0])].name
        words = f"{other} has another format than {files[0].name}: one of them has JSON lines."
        raise Refused("invalid_dataset", words)
    schema = schema_of(files)
    return schema, ((in_columns(batch, schema), batch) for batch in read_rows(files))


class Renderer:
    """Makes lines of rows. Raises :class:`Refused` for a template that nothing can be made with."""

    def __init__(self, job: RenderJob, schema: pa.Schema) -> None:
        self._job = job
        self._source = job.template
        with _limited(_COMPILE_SECONDS):
            self._template, names = _compiled(job.template)
        used = {*(schema.names if _ROW in names else names), _CUSTOM_ID}
        self._columns = [each for each in schema.names if each in used]
        for name in self._columns:
            if kind := type_without_meaning(schema.field(name)):
                raise Refused(
                    "invalid_dataset",
                    f"The column {name!r} is of the type {kind}, which a template cannot read. "
                    f"Write it as text or as JSON.",
                )
        self._has_id = _CUSTOM_ID in schema.names

    def lines(self, rows: Iterable[Row], first: int) -> Iterator[bytes]:
        """The line of each row, the first of which has the number ``first``."""
        for number, row in enumerate(rows, first):
            yield self._line(number, row)

    def values(self, batch: pa.RecordBatch) -> Iterable[Row]:
        """Each row as Python's objects, unless it has a value that Python has not."""
        columns = []
        for name in self._columns:
            try:
                columns.append(values_of(batch.column(name)))
            except (
                *(ValueError, TypeError, OverflowError, RecursionError, LookupError),
                pa.ArrowException,
            ):
                if batch.num_rows == 1:
                    words = f"its value of {name!r} cannot be given to a template"
                    return [UnusableRow(words)]
                rows = (self.values(batch.slice(each, 1)) for each in range(batch.num_rows))
                return (row for one in rows for row in one)
        if not columns:
            return ({} for _ in range(batch.num_rows))
        return (dict(zip(self._columns, row, strict=True)) for row in zip(*columns, strict=True))

    def _line(self, number: int, row: Row) -> bytes:
        custom_id: Any = f"row-{number}"
        try:
            if isinstance(row, UnusableRow):
                raise _failed(row.why)
            # A key that a line does not have is an empty value, and no error: others have it.
            row = {name: row.get(name) for name in self._columns}
            if self._has_id:
                custom_id = row[_CUSTOM_ID]
                if isinstance(custom_id, int) and not isinstance(custom_id, bool):
                    custom_id = str(custom_id)
                elif not isinstance(custom_id, str):
                    custom_id = None
            body = self._body(row)
            line = b'{"custom_id":%s,"method":"POST","url":%s,"body":%s}\n' % (
                _encode(custom_id),
                _encode(self._job.url),
                body,
            )
            if len(line) - 1 > self._job.most_line_bytes:
                raise self._too_long()
        except _RowFailed as failed:
            error = {"code": failed.code, "message": failed.message}
            return _encode({"custom_id": custom_id, TEMPLATE_ERROR: error}) + b"\n"
        return line

    def _body(self, row: dict[str, Any]) -> bytes:
        text = self._rendered({_ROW: row, **row})
        try:
            data = text.encode()
            body = _decode(data)
        except (ValueError, RecursionError):
            raise _RowFailed(
                "template_invalid_json",
                "The template makes no JSON of this row: write {{ column | tojson }}, without "
                "quotes around it.",
            ) from None
        if not isinstance(body, dict):
            raise _RowFailed(
                "template_invalid_json", "The template must make a JSON object, the request's body."
            )
        # One line, with the values as they are written.
        data = msgspec.json.format(data, indent=-1)
        if self._job.model is not None and "model" not in body:
            head = b'{"model":%s' % _encode(self._job.model)
            return head + (b"," + data[1:] if body else b"}")
        return data

    def _rendered(self, values: dict[str, Any]) -> str:
        try:
            with _limited():
                return "".join(self._bounded(self._template.generate(values)))
        except _RowFailed:
            raise
        except _TooSlow:
            words = f"The template takes more than {ROW_SECONDS:g} s of processor time for a row."
            raise _RowFailed("template_limit", words) from None
        except (MemoryError, OverflowError):
            words = "The template needs too much memory for this row."
            raise _RowFailed("template_limit", words) from None
        except Exception as error:  # noqa: BLE001 - whatever a template's expressions raise
            raise _failed(self._words(error), _line_of(error)) from None

    def _bounded(self, parts: Iterable[str]) -> Iterator[str]:
        size = 0
        for part in parts:
            size += len(part)
            if size > self._job.most_line_bytes:
                raise self._too_long()
            yield part

    def _words(self, error: Exception) -> str:
        """What is wrong, without what may be of the row."""
        said = str(error)
        if isinstance(error, TemplateError) and all(
            word in self._source or word.endswith(" object") for word in _QUOTED.findall(said)
        ):
            return said
        return f"{type(error).__name__}"

    def _too_long(self) -> _RowFailed:
        words = f"The template makes a line of more than {self._job.most_line_bytes} bytes."
        return _RowFailed("template_limit", words)


def _compiled(source: str) -> tuple[Template, set[str]]:
    """The template, and the names of the columns that it asks for."""
    environment = new_environment()
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        code = environment.compile(source, filename=_SOURCE_NAME)
        template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )
    except _TooSlow:
        raise Refused("template_limit", "The template takes too long to compile.") from None
    except MemoryError:
        raise Refused("template_limit", "The template needs too much memory.") from None
    except TemplateError as error:
        raise Refused("invalid_template", f"The template is not valid: {error}") from None
    except (RecursionError, SyntaxError, ValueError):
        raise Refused("invalid_template", "The template is nested too deeply.") from None
    return template, names


@contextmanager
def _limited(seconds: float = ROW_SECONDS) -> Iterator[None]:
    """Raise :class:`_TooSlow` after so much processor time."""
    soft = int(time.process_time()) + _STUCK_SECONDS
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _stop(*_: object) -> None:
    raise _TooSlow


def _failed(words: str, line: int | None = None) -> _RowFailed:
    where = "" if line is None else f" in its line {line}"
    return _RowFailed("template_failed", f"The template fails for this row{where}: {words}.")


def _line_of(error: Exception) -> int | None:
    """The line of the template."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((each.lineno for each in reversed(frames) if each.filename == _SOURCE_NAME), None)
