"""Arrow's values as a template sees them: JSON as objects, UUIDs as text, times as Python has them.

Arrow casts no extension type within a list or an object. So a column is first viewed as what it is
stored as, then cast to types whose values Python has, and then its JSON and its UUIDs are read.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

    _Change: TypeAlias = Callable[[pa.DataType], pa.DataType]
    _Reader: TypeAlias = Callable[[Any], Any]

_EXTENSION_NAME: Final = b"ARROW:extension:name"
"""In the metadata of a field whose extension type pyarrow does not know."""
_VARIANT: Final = ({"metadata", "value"}, {"metadata", "value", "typed_value"})
"""The fields of Parquet's type, which pyarrow reads as an object with bytes."""
_encode = msgspec.json.Encoder(decimal_format="string").encode
_decode = msgspec.json.Decoder().decode


def json_text(value: Any) -> str | None:
    """The value as JSON; None stays None. Raises ``ValueError`` and ``TypeError``."""
    return None if value is None else _encode(value).decode()


def from_json(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ``ValueError`` and ``RecursionError``."""
    try:
        return _decode(text)
    except ValueError:
        # Python writes NaN and Infinity. What it reads beyond that has no UTF-8: half a character.
        found = json.loads(text if isinstance(text, str) else text.decode())
        json_text(found)
        return found


def values_of(column: pa.Array) -> list[Any]:
    """The column's values as Python's objects.

    Raises ``ValueError``, ``TypeError``, ``OverflowError``, ``RecursionError``, ``LookupError`` (a
    time zone that this machine does not know) and Arrow's errors for a value that Python lacks.
    """
    stored = stored_as(column)
    # A float of 32 bits becomes the shortest number that means it, which its tool shows too.
    for kind in (_changed(stored.type, _floats_as_text), _changed(stored.type, _plain)):
        if kind != stored.type:
            stored = stored.cast(kind, safe=False)
    values: list[Any] = stored.to_pylist(maps_as_pydicts="lossy")
    read = _reader(column.type)
    return values if read is None else list(map(read, values))


def stored_as(column: pa.Array) -> pa.Array:
    """The same values without extension types, at any depth."""
    kind = _changed(column.type, lambda each: each)
    return column if kind == column.type else column.view(kind)


def one_text_type(kind: pa.DataType) -> pa.DataType:
    """The type with a single type of texts, and one of bytes, also in place of dictionaries."""
    return _changed(kind, _one_text, keeps_extensions=True)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type without views in dictionaries, which Arrow can neither look up nor write."""
    return _changed(kind, _no_views, keeps_extensions=True)


def type_without_meaning(field: pa.Field) -> str | None:
    """The name of a column's type, if its values would be numbers or bytes without meaning."""
    known = getattr(field.type, "extension_name", "").encode()
    name = known or (field.metadata or {}).get(_EXTENSION_NAME)
    if name == b"pandas.period":
        return "pandas.period"
    is_variant = pa.types.is_struct(field.type) and {each.name for each in field.type} in _VARIANT
    return "VARIANT" if is_variant and pa.types.is_binary(field.type["metadata"].type) else None


def _changed(kind: pa.DataType, change: _Change, *, keeps_extensions: bool = False) -> pa.DataType:
    """The type after a change of all its parts, those within it first.

    Lists as views stay as they are: no tool writes them unasked, and Arrow's casts break them.
    """

    def of(field: pa.Field) -> pa.Field:
        return field.with_type(_changed(field.type, change, keeps_extensions=keeps_extensions))

    if isinstance(kind, pa.BaseExtensionType):
        return kind if keeps_extensions else _changed(kind.storage_type, change)
    if pa.types.is_dictionary(kind):
        values = of(pa.field("", kind.value_type)).type
        kind = pa.dictionary(kind.index_type, values, kind.ordered)
    elif pa.types.is_struct(kind):
        kind = pa.struct(list(map(of, kind)))
    elif pa.types.is_map(kind):
        kind = pa.map_(of(kind.key_field), of(kind.item_field), kind.keys_sorted)
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(of(kind.value_field), kind.list_size)
    elif pa.types.is_list(kind):
        kind = pa.list_(of(kind.value_field))
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(of(kind.value_field))
    return change(kind)


def _floats_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_float32(kind) else kind


def _plain(kind: pa.DataType) -> pa.DataType:
    """The same type without nanoseconds, which Python does not have."""
    if pa.types.is_float32(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    return kind


def _one_text(kind: pa.DataType) -> pa.DataType:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def _no_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type):
        return pa.dictionary(kind.index_type, pa.string(), kind.ordered)
    return kind


_READERS: Final[dict[str, _Reader]] = {
    "arrow.json": from_json,
    "arrow.uuid": lambda data: str(uuid.UUID(bytes=data)),
    "arrow.bool8": bool,
}


def _reader(kind: pa.DataType) -> _Reader | None:
    """Makes the value of what is stored; None: it is that."""
    read = _reader_of_values(kind)
    return read and (lambda stored: None if stored is None else read(stored))


def _reader_of_values(kind: pa.DataType) -> _Reader | None:
    if isinstance(kind, pa.BaseExtensionType):
        return _READERS.get(kind.extension_name) or _reader_of_values(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _reader_of_values(kind.value_type)
    if pa.types.is_struct(kind):
        fields = {each.name: read for each in kind if (read := _reader(each.type))}
        if fields:
            return lambda row: row | {name: read(row[name]) for name, read in fields.items()}
    elif pa.types.is_map(kind):
        key, item = _reader(kind.key_type), _reader(kind.item_type)
        if key or item:
            return lambda of: dict(
                zip(map(key or _same, of), map(item or _same, of.values()), strict=True)
            )
    elif (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        read = _reader(kind.value_type)
        return read and (lambda items: list(map(read, items)))
    return None


def _same(value: Any) -> Any:
    return value
