"""Rows of Parquet and Arrow files, as record batches that fit into memory, and into Parquet."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from batchyard.datasets.jobs import Refusal

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
_encode = msgspec.json.Encoder(decimal_format="string").encode


class Refused(Exception):
    """The data is not what this program can work with."""

    def __init__(self, code: str, message: str) -> None:
        self.refusal = Refusal(code, message)
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
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise Refused(
            "invalid_dataset", f"{what} cannot be read or kept as rows ({type(error).__name__})."
        ) from None


def is_json_lines(path: Path) -> bool:
    """Whether it is not Parquet and not Arrow, by its first bytes."""
    return not _start_of(path).startswith((_PARQUET, *_ARROW))


def json_text(value: Any) -> str | None:
    """The value as JSON; None stays None. Raises ``ValueError`` and ``TypeError``."""
    return None if value is None else _encode(value).decode()


def schema_of(path: Path) -> pa.Schema:
    """The columns of the file. Raises :class:`Refused`."""
    with arrow_errors_as_ours(path.name), closing(_opened(path)) as opened:
        schema: pa.Schema = next(opened)
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    if repeated:
        raise Refused("invalid_dataset", f"{path.name} has two columns named {repeated[0]!r}.")
    return schema.remove_metadata()


def read_rows(files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All rows, with the columns of ``schema``. Raises :class:`Refused`."""
    for path in files:
        with arrow_errors_as_ours(path.name), closing(_opened(path)) as opened:
            next(opened)
            for batch in opened:
                yield from _small(_with_schema(batch, schema, path))


def _with_schema(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    try:
        # Those that the first file does not have would be lost without a word.
        if len(batch.schema) == len(schema):
            chosen = batch.select(schema.names)
            # A cast leaves them out within objects too.
            if not any(map(_has_more, chosen.schema.types, schema.types)):
                return chosen.cast(schema)
    except (KeyError, pa.ArrowException):
        pass
    raise Refused(
        "invalid_dataset", f"{path.name} has other columns than the first file of the dataset."
    )


def _has_more(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether objects somewhere in its values have fields that those of ``wanted`` do not have."""
    others = _parts_of(wanted)
    return any(
        name not in others or _has_more(part, others[name])
        for name, part in _parts_of(kind).items()
    )


def _parts_of(kind: pa.DataType) -> dict[str | int, pa.DataType]:
    fields = [kind.field(each) for each in range(kind.num_fields)]
    # Writers name the items of a list as they like.
    names = [each.name for each in fields] if pa.types.is_struct(kind) else range(len(fields))
    return {name: field.type for name, field in zip(names, fields, strict=True)}


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


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type whose values Python has: no nanoseconds, no dictionaries, no extensions."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_struct(kind):
        fields = (kind.field(each) for each in range(kind.num_fields))
        return pa.struct([field.with_type(plain_type(field.type)) for field in fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    return kind


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
        self._schema = pa.schema(texts)
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
    plain = plain_type(column.type)
    try:
        if plain != column.type:
            column = column.cast(plain, safe=False)
        values = column.to_pylist(maps_as_pydicts="lossy")
        return pa.array(map(json_text, values), pa.string())
    except (ValueError, TypeError, OverflowError, LookupError, pa.ArrowException):
        raise Refused(
            "invalid_dataset",
            f"The column {name!r} cannot be kept: Parquet does not have its type, and JSON not all "
            "its values. Remove it from the dataset.",
        ) from None
