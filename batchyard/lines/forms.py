"""Requests that an engine takes as multipart forms: made from a JSON body and a file. Pure.

A line of a batch cannot hold a file, so its body names one as ``file_url``; every other field of
the body becomes a field of the form.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec

from batchyard.lines.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ANY_BYTES: Final = "application/octet-stream"
_MEDIA_TYPE: Final = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
_MAX_NAME_CHARS: Final = 100
# Of media types that do not end in theirs. Python's own table knows no audio/wav, and what it
# knows depends on the machine.
_EXTENSIONS: Final = {"mpeg": "mp3", "octet-stream": "bin", "plain": "txt", "svg+xml": "svg"}


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file as a form carries it."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """A whole multipart body; ``content_type`` names its boundary, and has no space in it."""

    content_type: str
    body: bytes


def is_file_url(value: Any) -> bool:
    """Whether this can be a ``file_url``, only by its scheme."""
    return isinstance(value, str) and bool(re.match(r"(?:https?://|data:)", value, re.IGNORECASE))


def is_data_url(url: str) -> bool:
    """Whether the URL holds its file itself, as ``data:`` URLs do."""
    return url[:5].lower() == "data:"


def read_data_url(url: str) -> AttachedFile:
    """The file within a data URL. Raises ``ValueError`` that does not quote it."""
    head, comma, text = url[len("data:") :].partition(",")
    if not comma:
        raise ValueError("it is not a data URL: there is no comma")
    media_type, *options = head.split(";")
    if not _MEDIA_TYPE.fullmatch(media_type):
        media_type = _ANY_BYTES
    data = unquote_to_bytes(text)
    if options and options[-1].strip().lower() == "base64":
        try:
            data = base64.b64decode(b"".join(data.split()), validate=True)
        except binascii.Error:
            raise ValueError("its base64 is broken") from None
    subtype = media_type.rpartition("/")[2].lower().removeprefix("x-")
    return AttachedFile(f"file.{_EXTENSIONS.get(subtype, subtype)}", media_type, data)


def named_by_url(url: str, data: bytes) -> AttachedFile:
    """What came from a URL, named and typed by its path: engines tell formats by the name."""
    last = unquote(urlsplit(url).path).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", last)[-_MAX_NAME_CHARS:] or "file"
    return AttachedFile(name, mimetypes.guess_type(name)[0] or _ANY_BYTES, data)


def make_form(url: str, body: Mapping[str, Any], file: AttachedFile) -> Form:
    """The form for a request to ``url``, an endpoint that :func:`takes a form <takes_form>`.

    A list becomes a field for each item, under the name with ``[]``, as OpenAI's clients send
    it; an object becomes JSON text.
    """
    from urllib3 import encode_multipart_formdata  # noqa: PLC0415 - few requests are forms

    fields: list[tuple[str, str | tuple[str, bytes, str]]] = []
    for name, value in body.items():
        if name != "file_url":
            fields += _fields(name, value)
    file_field = ENDPOINTS[url].file_field
    assert file_field is not None  # noqa: S101 - see above
    fields.append((file_field, (file.name, file.data, file.media_type)))
    encoded, content_type = encode_multipart_formdata(fields)
    return Form(content_type.replace(" ", ""), encoded)


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield f"{name.removesuffix('[]')}[]", _text(item)
    elif value is not None:
        yield name, _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
