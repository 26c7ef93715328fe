"""Requests that an engine takes as multipart forms: made from a JSON body and a file. Pure.

A line of a batch cannot hold a file, so its body names one as ``file_url``; every other field of
the body becomes a field of the form.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_FIELDS: Final = {
    "/v1/audio/transcriptions": "file",
    "/v1/audio/translations": "file",
    "/v1/images/edits": "image",
}
"""The endpoints that take forms, and the form's field for the file."""

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
    """Whether this can be a ``file_url``, by its scheme alone."""
    return isinstance(value, str) and bool(re.match(r"(?:https?://|data:)", value, re.IGNORECASE))


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(url: str) -> AttachedFile:
    """The file within a data URL. Raises ``ValueError`` that does not quote it."""
    head, comma, text = url[len("data:") :].partition(",")
    if not comma:
        raise ValueError("it is no data URL: there is no comma")
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
    """The form for a request to ``url``, one of :data:`FILE_FIELDS`.

    A list becomes a field for each item, under the name with ``[]``, as OpenAI's clients send
    it; an object becomes JSON text.
    """
    boundary = secrets.token_hex(16)
    parts = []
    for name, value in body.items():
        if name == "file_url":
            continue
        for full_name, text in _fields(name, value):
            parts.append(b'%b"\r\n\r\n%b\r\n' % (_head(boundary, full_name), text.encode()))
    parts += (
        b'%b"; filename="%b"\r\nContent-Type: %b\r\n\r\n'
        % (_head(boundary, FILE_FIELDS[url]), file.name.encode(), file.media_type.encode()),
        file.data,
        f"\r\n--{boundary}--\r\n".encode(),
    )
    return Form(f"multipart/form-data;boundary={boundary}", b"".join(parts))


def _head(boundary: str, name: str) -> bytes:
    # As browsers escape a field's name.
    for char, escaped in (('"', "%22"), ("\r", "%0D"), ("\n", "%0A")):
        name = name.replace(char, escaped)
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}'.encode()


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield f"{name.removesuffix('[]')}[]", _text(item)
    elif value is not None:
        yield name, _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
