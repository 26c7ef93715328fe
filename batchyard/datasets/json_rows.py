"""Rows of JSON lines: for templates as they are written, for the table as columns.

Arrow's own reader knows the types of the first piece only, and gives objects each other's keys. So
the files are read twice: first for the types of the columns, then for the rows. A line that is no
row keeps its place, with the reason. In the first place of a file, it refuses the file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from batchyard.datasets.tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    Refused,
    arrow_errors_as_ours,
)
from batchyard.datasets.values import from_json, json_text
from batchyard.lines.framing import stray_mark
from batchyard.lines.json_depth import MAX_DEPTH, is_deeper_than

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_MOST_LINE_BYTES: Final = BATCH_BYTES
_BUFFER_BYTES: Final = 1024**2
_BOM: Final = b"\xef\xbb\xbf"
_MOST_COLUMNS: Final = 2000
"""Each needs memory in every piece. Keys that are identifiers would give one for each row."""
_MOST_FIELDS: Final = 1000
"""Of a column that is kept as fields and lists: each is a column of Parquet's."""
_MOST_LEVELS: Final = 16
"""Of a column that is kept as fields and lists: Parquet's readers stop at about 50."""
_EXACT: Final = 2**53
"""Floats have all integers up to this."""
_LONG: Final = 2**63


class _Type(Enum):
    NULL = auto()
    BOOL = auto()
    INT = auto()
    LONG = auto()
    """An integer that a float might not have."""
    FLOAT = auto()
    TEXT = auto()
    JSON = auto()
    """Whatever no other type holds, as JSON text."""


_ARROW_TYPES: Final = {
    _Type.NULL: pa.null(),
    _Type.BOOL: pa.bool_(),
    _Type.INT: pa.int64(),
    _Type.LONG: pa.int64(),
    _Type.FLOAT: pa.float64(),
    _Type.TEXT: pa.string(),
    _Type.JSON: pa.string(),
}
_BOTH: Final = {
    frozenset({_Type.INT, _Type.LONG}): _Type.LONG,
    frozenset({_Type.INT, _Type.FLOAT}): _Type.FLOAT,
}
"""The type that holds the values of both; otherwise it is JSON."""
_Kind: TypeAlias = "_Type | list[_Kind] | dict[str, _Kind]"
"""Of values: a list has the kind of its items, a dict the kinds of its keys."""


@dataclass(frozen=True)
class UnusableRow:
    """A row that no template can be rendered with."""

    why: str
    """The reason, without anything of the row."""


Row: TypeAlias = "dict[str, Any] | UnusableRow"


class JsonLines:
    """The rows of JSON lines files. ``schema``: all their columns, also optional ones.

    Raises :class:`Refused`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._kinds: dict[str, _Kind] = {}
        for path in files:
            with arrow_errors_as_ours(path.name):
                self._add_kinds(path)
        for name, kind in self._kinds.items():
            if _fields(kind) > _MOST_FIELDS:
                self._kinds[name] = _Type.JSON
        if not self._kinds:
            raise Refused("invalid_dataset", f"{files[0].name} has no rows with values.")
        self.schema = pa.schema(
            [pa.field(name, _arrow_type(kind)) for name, kind in self._kinds.items()]
        )

    def pieces(self) -> Iterator[tuple[pa.RecordBatch, list[Row]]]:
        """All rows, as columns and as they are written. Raises :class:`Refused`."""
        for path in self._files:
            with arrow_errors_as_ours(path.name):
                for rows in _gathered(path):
                    yield self._batch(rows), rows

    def _add_kinds(self, path: Path) -> None:
        kinds = self._kinds
        for number, (row, _) in enumerate(_rows_of(path)):
            if isinstance(row, UnusableRow):
                if not number:
                    words = f"{path.name} is neither Parquet, Arrow nor JSON lines: {row.why}."
                    raise Refused("invalid_dataset", words)
                continue
            for name, value in row.items():
                kinds[name] = _widened(kinds.get(name, _Type.NULL), value, _MOST_LEVELS)
            if len(kinds) > _MOST_COLUMNS:
                words = f"{path.name} has more than {_MOST_COLUMNS} columns: put them into objects."
                raise Refused("invalid_dataset", words)

    def _batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        objects = [{} if isinstance(row, UnusableRow) else row for row in rows]
        columns = []
        for field, kind in zip(self.schema, self._kinds.values(), strict=True):
            values = [row.get(field.name) for row in objects]
            if kind is _Type.JSON:
                values = list(map(json_text, values))
            columns.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _gathered(path: Path) -> Iterator[list[Row]]:
    """The file's rows, as many as are turned into columns at once."""
    rows: list[Row] = []
    size = 0
    for row, length in _rows_of(path):
        if rows and (len(rows) == BATCH_ROWS or size + length > BATCH_BYTES):
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += length
    if rows:
        yield rows


def _rows_of(path: Path) -> Iterator[tuple[Row, int]]:
    """The row of each line that is not blank, and the line's bytes."""
    # Arrow decompresses by the name, as for its own readers.
    with io.BufferedReader(pa.input_stream(str(path)), _BUFFER_BYTES) as file:
        for number, line in _lines_of(file):
            if line is None:
                found: dict[str, Any] | str = f"longer than {_MOST_LINE_BYTES} bytes"
            else:
                found = _object_of(line)
            if isinstance(found, str):
                yield UnusableRow(f"line {number} of {path.name} is {found}"), 0
            else:
                yield found, len(line or b"")


def _lines_of(file: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers; None: it is too long."""
    number = 0
    while line := file.readline(_MOST_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) > _MOST_LINE_BYTES:
            while not line.endswith(b"\n") and (line := file.readline(_BUFFER_BYTES)):
                pass
            yield number, None
        elif line and not line.isspace():
            yield number, line


def _object_of(line: bytes) -> dict[str, Any] | str:
    """The line's object, or what the line is instead."""
    try:
        found = from_json(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        why = stray_mark(line)
        return "not a valid JSON object" + ("" if why is None else f": {why}")
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and is_deeper_than(found, MAX_DEPTH):
        return f"nested deeper than {MAX_DEPTH} levels"
    return found


def _widened(kind: _Kind, value: Any, levels: int) -> _Kind:
    """The kind of the values so far and of one more, with so many levels of objects and lists."""
    if value is None or kind is _Type.JSON:
        return kind
    if isinstance(value, dict):
        return _widened_fields(kind, value, levels)
    if isinstance(value, list):
        return _widened_items(kind, value, levels)
    found = _type_of(value)
    if kind is found or kind is _Type.NULL:
        return found
    return (
        _BOTH.get(frozenset({kind, found}), _Type.JSON) if isinstance(kind, _Type) else _Type.JSON
    )


def _widened_fields(kind: _Kind, value: dict[str, Any], levels: int) -> _Kind:
    """JSON, unless all objects have the same keys; Parquet has no objects without any."""
    if kind is _Type.NULL and levels and value:
        kind = dict.fromkeys(value, _Type.NULL)
    if not isinstance(kind, dict) or kind.keys() != value.keys():
        return _Type.JSON
    for name, each in value.items():
        found = _widened(kind[name], each, levels - 1)
        if found is _Type.JSON:
            return found
        kind[name] = found
    return kind


def _widened_items(kind: _Kind, value: Iterable[Any], levels: int) -> _Kind:
    if kind is _Type.NULL and levels:
        kind = [_Type.NULL]
    if not isinstance(kind, list):
        return _Type.JSON
    for each in value:
        found = _widened(kind[0], each, levels - 1)
        if found is _Type.JSON:
            return found
        kind[0] = found
    return kind


def _type_of(value: bool | float | str) -> _Type:
    if isinstance(value, str):
        return _Type.TEXT
    if isinstance(value, bool):
        return _Type.BOOL
    if isinstance(value, float):
        return _Type.FLOAT
    if -_EXACT <= value <= _EXACT:
        return _Type.INT
    return _Type.LONG if -_LONG <= value < _LONG else _Type.JSON


def _fields(kind: _Kind) -> int:
    """How many values without further ones are within it."""
    if isinstance(kind, list):
        return _fields(kind[0])
    return sum(map(_fields, kind.values())) if isinstance(kind, dict) else 1


def _arrow_type(kind: _Kind) -> pa.DataType:
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([pa.field(name, _arrow_type(each)) for name, each in kind.items()])
    return _ARROW_TYPES[kind]
