"""``multipart/form-data`` as a stream: one file of any size, and small fields around it.

Parts may come in any order and the file with or without a name, a type or a length: openai-node
sends the file first and in chunks. FastAPI's own forms would put the whole file on disk first.

python-multipart splits the body. The options of its headers are read here: its own
``parse_options_header`` drops ``filename*`` and rewrites a name like ``C:\\x``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchyard.api.http.api_error import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable

    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES: Final = 16 * 1024
MAX_FIELDS: Final = 32
_MAX_BOUNDARY_CHARS = 200  # RFC 2046 has 70

_PARAMETER = re.compile(
    rb""";\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)""", re.DOTALL
)
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class PartHead:
    """What a part says of itself. ``name`` is the field's."""

    name: str
    filename: str | None


class Form:
    """One form. Iterate :meth:`content`; then ``fields`` has every field, ``file`` the file's head.

    ``file_field`` is the name of the part that is streamed, whatever else it says. Before its end
    ``fields`` has those that came first. ``limit_bytes`` is asked again with each chunk: which
    limit holds may depend on a field.
    """

    def __init__(
        self, content_type: str, *, file_field: str, limit_bytes: Callable[[dict[str, str]], int]
    ) -> None:
        self.fields: dict[str, str] = {}
        self.file: PartHead | None = None
        self.file_bytes = 0
        self._file_field = file_field
        self._limit_bytes = limit_bytes
        self._events = _Events()
        self._parser = MultipartParser(
            _boundary(content_type), self._events.callbacks(), max_header_size=8192
        )
        self._part: PartHead | None = None
        self._value = bytearray()

    async def content(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
        """The file's bytes. Ends with the form, not with the file; no file: yields nothing.

        Raises 400 for what is no form, and 413 for a file over the limit.
        """
        async for chunk in body:
            try:
                self._parser.write(chunk)
            except FormParserError:
                raise _malformed() from None
            for event in self._events.take():
                if (piece := self._next(event)) is not None:
                    yield piece
        if not self._events.ended:
            raise ApiError(400, "The multipart form ends too early: its last boundary is missing.")

    def _next(self, event: PartHead | bytes | None) -> bytes | None:
        """Take one event in; the bytes of the file, where it is some."""
        match event:
            case PartHead():
                self._begin(event)
            case None:
                self._end()
            case bytes() if self._is_file():
                self.file_bytes += len(event)
                limit = self._limit_bytes(self.fields)
                if self.file_bytes > limit:
                    raise too_large(self._file_field, limit)
                return event
            case bytes():
                self._value += event
                if len(self._value) > MAX_FIELD_BYTES:
                    raise ApiError(
                        400, f"A form field may have {MAX_FIELD_BYTES} bytes.", param=self._shown()
                    )
        return None

    def _begin(self, head: PartHead) -> None:
        self._part = head
        if head.name in self.fields or (self._is_file() and self.file is not None):
            raise ApiError(400, f"'{self._shown()}' is in the form twice.", param=self._shown())
        if self._is_file():
            self.file = head
        elif len(self.fields) == MAX_FIELDS:
            raise ApiError(400, f"A form may have {MAX_FIELDS} fields.")

    def _end(self) -> None:
        if self._part is not None and not self._is_file():
            try:
                self.fields[self._part.name] = self._value.decode()
            except UnicodeDecodeError:
                raise ApiError(
                    400, f"'{self._shown()}' is not UTF-8.", param=self._shown()
                ) from None
            self._value.clear()
        self._part = None

    def _is_file(self) -> bool:
        return self._part is not None and self._part.name == self._file_field

    def _shown(self) -> str:
        return self._part.name[:64] if self._part is not None else ""


class _Events:
    """What the parser says while it takes a chunk: heads, bytes, and None for a part's end."""

    def __init__(self) -> None:
        self.ended = False
        self._pending: list[PartHead | bytes | None] = []
        self._name = bytearray()
        self._value = bytearray()
        self._disposition: bytes | None = None

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": lambda data, start, end: self._pending.append(bytes(data[start:end])),
            "on_part_end": lambda: self._pending.append(None),
            "on_end": self._form_ends,
        }

    def take(self) -> list[PartHead | bytes | None]:
        taken, self._pending = self._pending, []
        return taken

    def _part_begins(self) -> None:
        self._disposition = None

    def _header_ends(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        self._pending.append(_head(self._disposition))

    def _form_ends(self) -> None:
        self.ended = True


def too_large(param: str, limit_bytes: int) -> ApiError:
    """413, for what has more bytes than it may."""
    return ApiError(
        413,
        f"'{param}' is too large: it may have {limit_bytes} bytes.",
        param=param,
        code="file_too_large",
    )


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise ApiError(415, "Send this request as multipart/form-data.")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS:
        raise ApiError(400, "The Content-Type of a multipart form must name its boundary.")
    return boundary


def _head(disposition: bytes | None) -> PartHead:
    parameters = {name.lower(): value for name, value in _PARAMETER.findall(disposition or b"")}
    name = parameters.get(b"name")
    if name is None:
        raise _malformed()
    filename = _extended(parameters.get(b"filename*"))
    if filename is None and b"filename" in parameters:
        filename = _text(parameters[b"filename"])
    return PartHead(_text(name), filename)


def _text(value: bytes) -> str:
    """A parameter's value, quoted or not; browsers and SDKs send names as bare UTF-8."""
    value = value.strip()
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return _ESCAPED.sub(r"\1", text[1:-1])
    return text


def _extended(value: bytes | None) -> str | None:
    """RFC 5987, as .NET sends it: ``utf-8''na%C3%AFve.jsonl``. None: absent or unreadable."""
    if value is None:
        return None
    charset, quote, rest = _text(value).partition("'")
    _, second_quote, encoded = rest.partition("'")
    if not (quote and second_quote) or charset.lower() not in {"utf-8", "iso-8859-1"}:
        return None
    try:
        return unquote(encoded, charset, "strict")
    except UnicodeDecodeError:
        return None


def _malformed() -> ApiError:
    return ApiError(400, "The body is not a well-formed multipart form.")
