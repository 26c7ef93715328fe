"""Rows of Parquet, Arrow and JSON lines files, as record batches that fit into memory."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet as pq

from batchyard.datasets.jobs import Refusal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

_ROWS: Final = 1024
_BATCH_BYTES: Final = 16 * 1024**2
"""About so many bytes are turned into Python's objects at once."""
_GROUP_ROWS: Final = 65_536
_GROUP_BYTES: Final = 64 * 1024**2
_PAGE_BYTES: Final = 1024**2


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
        return batch.select(schema.names).cast(schema)
    except (KeyError, pa.ArrowException):
        raise Refused(
            "invalid_dataset", f"{path.name} has other columns than the first file of the dataset."
        ) from None


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    size = max(1, min(_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _opened(path: Path) -> Generator[Any]:
    """The file's schema, then its record batches."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"PAR1"):
        yield from _parquet(path)
    elif magic.startswith(b"ARROW1"):
        with pa.OSFile(str(path)) as source:
            reader = pa.ipc.open_file(source)
            yield reader.schema
            yield from map(reader.get_batch, range(reader.num_record_batches))
    elif magic.startswith(b"\xff\xff\xff\xff"):
        with pa.OSFile(str(path)) as source:
            stream = pa.ipc.open_stream(source)
            yield stream.schema
            yield from stream
    else:
        how = pa.json.ReadOptions(use_threads=False, block_size=_BATCH_BYTES)
        with pa.json.open_json(str(path), read_options=how) as lines:
            found = lines.schema
        schema = pa.schema([field.with_type(_as_written(field.type)) for field in found])
        parse = pa.json.ParseOptions(explicit_schema=schema)
        with pa.json.open_json(str(path), read_options=how, parse_options=parse) as lines:
            yield lines.schema
            yield from lines


def _as_written(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow infers from JSON, but a text stays one, also if it looks like a time."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        fields = (kind.field(each) for each in range(kind.num_fields))
        return pa.struct([field.with_type(_as_written(field.type)) for field in fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_written(kind.value_type)))
    return kind


def _parquet(path: Path) -> Generator[Any]:
    # Pages as they are needed, not whole row groups.
    with pq.ParquetFile(path, buffer_size=_PAGE_BYTES, pre_buffer=False) as file:
        yield file.schema_arrow
        for number in range(file.num_row_groups):
            # Of each by itself: rows of one may be far larger than those of another.
            group = file.metadata.row_group(number)
            size = _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            yield from file.iter_batches(max(1, min(_ROWS, size)), [number], use_threads=False)


class RowsWriter:
    """Record batches into a Parquet file, in row groups that fit into memory.

    Use as a context manager. Raises :class:`Refused`.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        with arrow_errors_as_ours("The dataset"):
            self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next rows."""
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            with arrow_errors_as_ours("The dataset"):
                self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._rows, self._bytes = [], 0, 0
