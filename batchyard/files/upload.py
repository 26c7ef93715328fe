"""A client's bytes become a file: streamed into the object store and checked on the way.

What is refused leaves nothing behind. A batch's input that is gzip or zstd is decompressed, so that
a plan can name places in it; files for other purposes are stored as they are. Only the first line
of a batch's input is looked at here; the rest is checked when a batch is made of it, for a client
waits for this answer.
"""

from __future__ import annotations

import codecs
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from unicodedata import category

import msgspec

from batchyard.errors import (
    LocationRefused,
    ObjectTooLarge,
    RequestRefused,
    StorageLimitExceeded,
)
from batchyard.files.parts import wipe_object
from batchyard.lines.framing import other_format
from batchyard.services.keys import file_key
from batchyard.services.quotas import arriving, default_quota
from batchyard.storage.compression import beginning, is_packed, unpacked, unpacked_name
from batchyard.store import NewFile
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS, LEAST_LIFETIME_SECONDS
from batchyard.wire import new_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from batchyard.services.services import Services
    from batchyard.store import FileRecord

PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
"""What a client may upload a file for."""

MAX_FILE_BYTES: Final = 512 * 1024**2
"""The most bytes of a file that is no batch's input, as at OpenAI; an input's limit is a
setting."""

_MAX_FILENAME_CHARS = 1024
_NO_NAMES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, surrogates, line and paragraph separators."""
_DIRECTIONS: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Behind one of these, "gpj.exe" is shown as "exe.jpg"."""
_SNIFFED_BYTES = 1024**2
_MAGIC_BYTES = 8
_BLANK = b" \t\r\n"
_NOTHING = (codecs.BOM_UTF8, *(bytes([each]) for each in _BLANK))


@dataclass(frozen=True, slots=True)
class FileUse:
    """What a client says of its file. ``lifetime_seconds`` None: the purpose's own.

    Raises :class:`~batchyard.errors.RequestRefused` for what cannot be.
    """

    filename: str
    purpose: str
    """One of :data:`PURPOSES`."""
    lifetime_seconds: int | None = None

    def __post_init__(self) -> None:
        if self.purpose not in PURPOSES:
            raise RequestRefused(
                f"'{self.purpose[:64]}' is not one of {list(PURPOSES)} - 'purpose'",
                param="purpose",
                code="invalid_purpose",
            )
        if len(self.filename) > _MAX_FILENAME_CHARS or any(map(_misleads, self.filename)):
            raise RequestRefused(
                f"A file's name may have {_MAX_FILENAME_CHARS} characters, and no line ends, "
                "control characters or changes of the direction of text.",
                param="filename",
                code="invalid_value",
            )
        if self.purpose == "batch" and not may_be_input(self.filename):
            raise RequestRefused(
                "Invalid file format for Batch API. Must be .jsonl, .jsonl.gz or .jsonl.zst",
                param=None,
                code="invalid_file_format",
            )

    def kept_name(self) -> str:
        """The name of what is stored: a batch's input is stored decompressed."""
        return unpacked_name(self.filename) if self.purpose == "batch" else self.filename

    def kept_seconds(self) -> int | None:
        """How long the file is kept: 30 days for a batch's input; ``None``: until it is deleted."""
        if self.lifetime_seconds is None and self.purpose == "batch":
            return FILE_LIFETIME_SECONDS
        return self.lifetime_seconds


def may_be_input(filename: str) -> bool:
    """Whether a batch's input may have this name."""
    return PurePosixPath(unpacked_name(filename)).suffix.lower() in {"", ".jsonl"}


def _misleads(char: str) -> bool:
    """Whether it ends a line, is no text, or makes a name look like another one.

    Not ``isprintable``: names in many languages have spaces and joiners that are not printable.
    """
    return char in _DIRECTIONS or category(char) in _NO_NAMES


def checked_lifetime(anchor: object, seconds: object) -> int:
    """``expires_after`` as seconds. Raises :class:`~batchyard.errors.RequestRefused`."""
    for name, value in (("anchor", anchor), ("seconds", seconds)):
        if value is None:
            raise _lifetime_refused(name, "missing_required_parameter", "is missing")
    if anchor != "created_at":
        raise _lifetime_refused("anchor", "invalid_value", "must be 'created_at'")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise _lifetime_refused("seconds", "invalid_type", "must be an integer")
    if seconds < LEAST_LIFETIME_SECONDS:
        least = f"must be at least {LEAST_LIFETIME_SECONDS}"
        raise _lifetime_refused("seconds", "integer_below_min_value", least)
    if seconds > FILE_LIFETIME_SECONDS:
        most = f"must be at most {FILE_LIFETIME_SECONDS}"
        raise _lifetime_refused("seconds", "integer_above_max_value", most)
    return seconds


def _lifetime_refused(name: str, code: str, what: str) -> RequestRefused:
    param = f"expires_after.{name}"
    return RequestRefused(f"'{param}' {what}.", param=param, code=code)


async def upload_file(
    services: Services,
    tenant: str,
    content: AsyncGenerator[bytes],
    use: Callable[[], FileUse],
    is_input: Callable[[], bool],
) -> FileRecord:
    """Store ``content`` and record it as a file. ``use`` is asked once ``content`` has ended.

    ``is_input`` is for :func:`plain_input`.

    Raises what those two raise, :class:`~batchyard.errors.RequestRefused`,
    :class:`~batchyard.errors.StorageLimitExceeded`, :class:`~batchyard.errors.ObjectTooLarge`, and
    errors of the store and the storage.
    """
    with arriving(services, tenant) as within_quota:
        plain = within_quota(plain_input(services, content, is_input))
        file = await store_content(services, tenant, plain, use)
    try:
        # If this fails the bytes stay for the sweep: the row may be there, its reply lost.
        return await services.store.files.create(file, quota=default_quota(services))
    except StorageLimitExceeded:
        await wipe_object(services, file.storage_key)
        raise


async def plain_input(
    services: Services, content: AsyncGenerator[bytes], is_input: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """The bytes of ``content``, decompressed if it is gzip or zstd and ``is_input``.

    That is asked when the first bytes are there, and again behind the last: a client may name the
    purpose of its file behind the file. Raises :class:`~batchyard.errors.RequestRefused` where the
    answer has become no, and for what is damaged or cut off, and
    :class:`~batchyard.errors.ObjectTooLarge` as soon as it is more than an input may have.
    """
    async with aclosing(content):
        start = await beginning(content)
        if not (is_packed(start) and is_input()):
            if start:
                yield start
            async for part in content:
                yield part
            return
        most = services.settings.limits.max_bytes
        try:
            plain = unpacked(content, "The file", limit_bytes=most, start=start)
            async with aclosing(plain) as parts:
                async for part in parts:
                    yield part
        except LocationRefused as error:
            raise RequestRefused(f"{error}.", param="file", code="invalid_file") from None
        if not is_input():
            raise RequestRefused(
                "The file is compressed, and its purpose came behind it: send 'purpose' first.",
                param="purpose",
                code="invalid_value",
            )


async def store_content(
    services: Services, tenant: str, content: AsyncIterable[bytes], use: Callable[[], FileUse]
) -> NewFile:
    """Do what :func:`upload_file` does, without the row: the bytes are durable, nothing names them
    yet."""
    file_id = new_file_id()
    first_line = FirstLine()

    async def checked() -> AsyncIterator[bytes]:
        size_bytes = 0
        async for part in content:
            size_bytes += len(part)
            first_line.add(part)
            yield part
        # Within the put, so that a refusal aborts it.
        _check_content(services, use(), size_bytes, first_line)

    stored = await services.storage.put(file_key(file_id), checked())
    wanted = use()
    return NewFile(
        id=file_id,
        tenant=tenant,
        purpose=wanted.purpose,
        filename=wanted.kept_name(),
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        lifetime_seconds=wanted.kept_seconds(),
    )


def limit_bytes(services: Services, purpose: str | None) -> int:
    """The largest file of that purpose; of any, where it is not known yet."""
    batch_bytes = services.settings.limits.max_bytes
    if purpose == "batch":
        return batch_bytes
    return MAX_FILE_BYTES if purpose is not None else max(batch_bytes, MAX_FILE_BYTES)


def _check_content(
    services: Services, use: FileUse, size_bytes: int, first_line: FirstLine
) -> None:
    if size_bytes == 0:
        raise RequestRefused("The file is empty.", param="file", code="empty_file")
    if use.purpose != "batch":
        return
    most = services.settings.limits.max_bytes
    if size_bytes > most:
        raise ObjectTooLarge(f"The input of a batch may have {most} bytes.")
    if first_line.is_blank:
        raise RequestRefused("The file has no request.", param="file", code="empty_file")
    if not first_line.is_json():
        why = "Its first line is not JSON: every line must be one JSON object."
        if (other := first_line.other_format) is not None:
            why = f"{other[0].upper()}{other[1:]}."
        raise RequestRefused(
            f"Invalid file format for Batch API. {why}",
            param="file",
            code="invalid_json_line",
        )


class FirstLine:
    """The first line that is not blank, of bytes that come in parts; at most 1 MiB of it."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._is_whole = False

    def add(self, part: bytes) -> None:
        """Take in the next bytes."""
        while part and not self._is_whole:
            taken = part[: _SNIFFED_BYTES + 1 - len(self._line)]
            part = part[len(taken) :]
            self._line += taken
            newline = taken.find(b"\n")
            if self._line.startswith(_NOTHING):
                # Blank lines, as many as there are: none of them is kept.
                self._line = self._line.removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)
                newline = self._line.find(b"\n")
            self._is_whole = newline >= 0 or len(self._line) > _SNIFFED_BYTES

    @property
    def is_blank(self) -> bool:
        """Whether nothing but blank lines has arrived."""
        return not self._text()

    @property
    def other_format(self) -> str | None:
        """What the file is that begins with this line and is no JSONL, and what helps."""
        return other_format(bytes(self._line[:_MAGIC_BYTES]))

    def is_json(self) -> bool:
        """Whether the first line is JSON; of a very long one, whether it begins like an object."""
        if len(self._line) > _SNIFFED_BYTES:
            # Too long to keep. A request begins so; the batch's own check reads all of it.
            return self._text().startswith(b"{")
        try:
            msgspec.json.decode(self._text())
        except (ValueError, RecursionError):
            return False
        return True

    def _text(self) -> bytes:
        return bytes(self._line.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0].strip(_BLANK))
