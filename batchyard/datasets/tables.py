"""Rows of Parquet and Arrow files, as record batches that fit into memory, and into Parquet."""

from __future__ import annotations

import textwrap
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from batchyard.datasets.jobs import Outcome
from batchyard.datasets.values import (
    from_json,
    json_text,
    one_text_type,
    stored_as,
    values_of,
    without_views,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

BATCH_ROWS: Final = 1024
BATCH_BYTES: Final = 16 * 1024**2
"""About so many bytes are turned into Python's objects at once."""
_GROUP_ROWS: Final = 65_536
_GROUP_BYTES: Final = 64 * 1024**2
_PAGE_BYTES: Final = 1024**2
_ARROW: Final = (b"ARROW1", b"\xff\xff\xff\xff")
_PARQUET: Final = b"PAR1"
_FEATURES: Final = b"huggingface"
_SHOWN_CHARS: Final = 200


class Refused(Exception):
    """The data is not what this program can work with."""

    def __init__(self, code: str, message: str) -> None:
        self.outcome = Outcome(code, message)
        super().__init__(message)


@contextmanager
def arrow_errors_as_ours(what: str) -> Iterator[None]:
    """Raise :class:`Refused` for what Arrow cannot read or write. Its own text may quote values."""
    try:
        yield
    except MemoryError:
        raise Refused(
            "dataset_too_large", f"{what} has rows that do not fit into the memory of one process."
        ) from None
    except pa.ArrowNotImplementedError:
        raise Refused(
            "invalid_dataset",
            f"{what} has something that pyarrow {pa.__version__} does not support, such as "
            "integers of 128 bits.",
        ) from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise Refused(
            "invalid_dataset", f"{what} cannot be read or kept as rows ({type(error).__name__})."
        ) from None


def is_json_lines(path: Path) -> bool:
    """Whether it is not Parquet and not Arrow, by its first bytes."""
    return not _start_of(path).startswith((_PARQUET, *_ARROW))


def schema_of(files: Sequence[Path]) -> pa.Schema:
    """The columns of all files, each of a type that has the values of all of them.

    Raises :class:`Refused` where the files do not fit together.
    """
    first = files[0]
    schema = _schema_of(first)
    features = _features_in(schema)
    for path in files[1:]:
        other = _schema_of(path)
        if different := set(schema.names) ^ set(other.names):
            raise Refused(
                "invalid_dataset",
                f"{path.name} has other columns than the first file of the dataset, {first.name}: "
                f"the difference is {_shown(', '.join(sorted(different)))}.",
            )
        schema = pa.schema([_merged(each, other.field(each.name), first, path) for each in schema])
        others = _features_in(other)
        features = {name: each for name, each in features.items() if others.get(name) == each}
    if not features:
        return schema.remove_metadata()
    return schema.with_metadata({_FEATURES: json_text({"info": {"features": features}})})


def read_rows(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    """All rows, in the columns of their files. Raises :class:`Refused`."""
    for path in files:
        with arrow_errors_as_ours(path.name), closing(_opened(path)) as opened:
            schema = _readable(next(opened))
            for batch in opened:
                yield from _small(in_columns(batch, schema))


def in_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a file in the columns of all. Raises :class:`Refused`."""
    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays(
        [_in_column(batch.column(field.name), field) for field in schema], schema=schema
    )


def _in_column(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        return stored_as(column).cast(field.type)
    except pa.ArrowException:
        raise Refused(
            "invalid_dataset",
            f"The column {field.name!r} is {_shown(column.type)} in one file of the dataset, with "
            f"values that {_shown(field.type)} of another file does not have. Give it one type.",
        ) from None


def _schema_of(path: Path) -> pa.Schema:
    with arrow_errors_as_ours(path.name), closing(_opened(path)) as opened:
        schema = _readable(next(opened))
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    if repeated:
        raise Refused("invalid_dataset", f"{path.name} has two columns named {repeated[0]!r}.")
    return schema


def _readable(schema: pa.Schema) -> pa.Schema:
    fields = [field.with_type(without_views(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def _features_in(schema: pa.Schema) -> dict[str, Any]:
    """What the columns are to Hugging Face's ``datasets``, so that it knows them in the answers.

    Not the fingerprint beside it, by which it would take the answers for the dataset. Nor what
    pandas writes: the names, the index and the number of one file's rows, which ours are not.
    """
    try:
        return dict(from_json(schema.metadata[_FEATURES])["info"]["features"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return {}


def _merged(field: pa.Field, other: pa.Field, first: Path, path: Path) -> pa.Field:
    """A field of a type that holds the values of both."""
    if field.type == other.type:
        # Such as the values of a polars Enum: they may be others.
        field = field if field.metadata == other.metadata else field.remove_metadata()
        return field.with_nullable(field.nullable or other.nullable)
    kinds = (field.type, other.type)
    for pair in (kinds, tuple(map(one_text_type, kinds))):
        schemas = [pa.schema([pa.field(field.name, kind)]) for kind in pair]
        with suppress(pa.ArrowException):
            return pa.unify_schemas(schemas, promote_options="permissive").field(0)
    raise Refused(
        "invalid_dataset",
        f"The column {field.name!r} is {_shown(field.type)} in {first.name} and "
        f"{_shown(other.type)} in {path.name}. Give it one type in all files.",
    )


def _shown(what: object) -> str:
    return textwrap.shorten(str(what), _SHOWN_CHARS)


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    size = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _opened(path: Path) -> Generator[Any]:
    """The file's schema, then its record batches."""
    magic = _start_of(path)
    if magic.startswith(_PARQUET):
        yield from _parquet(path)
    elif magic.startswith(_ARROW[0]):
        with pa.OSFile(str(path)) as source:
            reader = pa.ipc.open_file(source)
            yield reader.schema
            yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        with pa.OSFile(str(path)) as source:
            stream = pa.ipc.open_stream(source)
            yield stream.schema
            yield from stream


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(max(map(len, _ARROW)))


def _parquet(path: Path) -> Generator[Any]:
    # Pages as they are needed, not whole row groups.
    with pq.ParquetFile(path, buffer_size=_PAGE_BYTES, pre_buffer=False) as file:
        yield file.schema_arrow
        for number in range(file.num_row_groups):
            # Of each by itself: rows of one may be far larger than those of another.
            group = file.metadata.row_group(number)
            size = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            yield from file.iter_batches(max(1, min(BATCH_ROWS, size)), [number], use_threads=False)


class RowsWriter:
    """Record batches into a Parquet file, in row groups that fit into memory.

    A column of a type that Parquet does not have is written as JSON text. Use as a context manager.
    Raises :class:`Refused`.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._as_text = {field.name for field in schema if not _is_writable(field)}
        texts = [
            pa.field(each.name, pa.string()) if each.name in self._as_text else each
            for each in schema
        ]
        # What the metadata says of a column is not so of its text.
        self._schema = pa.schema(texts, None if self._as_text else schema.metadata)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        with arrow_errors_as_ours("The dataset"):
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next rows."""
        if self._as_text:
            batch = self._with_texts(batch)
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _with_texts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            _as_texts(column, name) if name in self._as_text else column
            for name, column in zip(self._schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _flush(self) -> None:
        if self._waiting:
            with arrow_errors_as_ours("The dataset"):
                self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._rows, self._bytes = [], 0, 0


def _is_writable(field: pa.Field) -> bool:
    """Whether Parquet has its type. There is no list of those: only the writer knows."""
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except (pa.ArrowException, OSError):
        return False
    return True


def _as_texts(column: pa.Array, name: str) -> pa.Array:
    try:
        return pa.array(map(json_text, values_of(column)), pa.string())
    except (ValueError, TypeError, OverflowError, LookupError, RecursionError, pa.ArrowException):
        raise Refused(
            "invalid_dataset",
            f"The column {name!r} cannot be kept: Parquet does not have its type, and JSON not all "
            "its values. Remove it from the dataset.",
        ) from None
