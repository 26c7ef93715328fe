"""gzip and zstd: streams of bytes that are unpacked, and files that are packed, as they pass.

What a stream is, its first bytes say, whatever it is called. No JSON Lines begin like these.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from typing import TYPE_CHECKING, Final, Protocol

from batchyard.errors import LocationRefused, ObjectTooLarge
from batchyard.processes.threads import in_thread
from batchyard.storage.blocks import BLOCK_BYTES
from batchyard.storage.file import read_file

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from pathlib import Path

SUFFIXES: Final = (".gz", ".zst")
"""The ends of names that say how a file is packed."""
PACKED_ENCODINGS: Final = ("gzip", "x-gzip", "zstd")
"""The same as values of the header ``Content-Encoding``."""

MAGIC_BYTES: Final = 4
"""How many bytes say what a file is."""
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
"""A frame, and those that are skipped, with which some tools begin a file."""
_WINDOW_LOG: Final = 23
"""8 MiB, which RFC 8878 asks every reader to have. A writer may ask for 2 GiB for each stream."""
_SLICE_BYTES: Final = 16 * 1024
"""zlib copies what is behind a member, and a block may have thousands of them."""
_MOST_TIMES: Final = 20_000
"""Lines that share a prompt of 100 KB are packed to a 10,000th, and zstd can do a 30,000th."""
_SURE_BYTES: Final = 1024**3
_ZSTD_LEVEL: Final = 3
_GZIP_LEVEL: Final = 6
_GZIP_FORMAT: Final = 16 + zlib.MAX_WBITS


class _Member(Protocol):
    """A gzip member or a zstd frame; a file may have several."""

    @property
    def needs_input(self) -> bool: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipMember:
    """zlib's object as bz2, lzma and zstd have theirs."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(_GZIP_FORMAT)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._object.decompress(self._object.unconsumed_tail + data, max_length)
        self.needs_input = not self._object.unconsumed_tail and len(found) < max_length
        return found


def _zstd_member() -> _Member:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


class _Unpacker:
    """The content of a packed stream, never more than a block at a time."""

    def __init__(self, new_member: Callable[[], _Member], padding: bytes) -> None:
        self._new_member = new_member
        self._padding = padding
        self._member: _Member | None = None
        self._block = memoryview(b"")
        self._pending = b""
        """The beginning of what the member has not seen yet."""

    def take(self, block: bytes) -> None:
        """The next bytes, once :meth:`step` has no more."""
        self._block = memoryview(block)

    def step(self) -> bytes:
        """Up to a block of content; empty: more input is needed."""
        found = bytearray()
        while len(found) < BLOCK_BYTES:
            if not self._pending and (self._member is None or self._member.needs_input):
                if not self._block:
                    break
                self._pending = bytes(self._block[:_SLICE_BYTES])
                self._block = self._block[_SLICE_BYTES:]
            if self._member is None:
                # Tapes and some tools fill a file with zeros.
                self._pending = self._pending.lstrip(self._padding)
                if not self._pending:
                    continue
                self._member = self._new_member()
            found += self._member.decompress(self._pending, BLOCK_BYTES - len(found))
            self._pending = b""
            if self._member.eof:
                self._pending, self._member = self._member.unused_data, None
        return bytes(found)

    @property
    def is_at_end(self) -> bool:
        """Whether the stream may end here."""
        return self._member is None


def is_packed(start: bytes) -> bool:
    """Whether a file that begins like this is gzip or zstd."""
    return _unpacker(start) is not None


def _unpacker(start: bytes) -> _Unpacker | None:
    if start.startswith(_GZIP):
        return _Unpacker(_GzipMember, b"\0")
    if start.startswith(_ZSTD):
        return _Unpacker(_zstd_member, b"")
    return None


def unpacked_name(name: str) -> str:
    """The name without the end that says how the file is packed."""
    return name[: -len(suffix)] if (suffix := packed_suffix(name)) else name


def packed_suffix(name: str) -> str:
    """The end of the name that says how the file is packed; empty: it is not."""
    return next((each for each in SUFFIXES if name.lower().endswith(each)), "")


async def beginning(parts: AsyncIterator[bytes]) -> bytes:
    """The first bytes of ``parts``, taken from them: enough for :func:`is_packed`, if there are."""
    start = b""
    async for part in parts:
        start += part
        if len(start) >= MAGIC_BYTES:
            break
    return start


async def unpacked(
    parts: AsyncIterator[bytes], name: str, *, limit_bytes: int, start: bytes | None = None
) -> AsyncGenerator[bytes]:
    """The content of ``parts``, in blocks of up to 1 MiB where they are packed.

    Raises :class:`~batchyard.errors.ObjectTooLarge` as soon as a packed stream has more content
    than ``limit_bytes``, and :class:`~batchyard.errors.LocationRefused` where it is damaged, cut
    off or made to be large, and where only its name says that it is packed. ``name`` is shown.
    What is not packed passes as it is. ``start``: what :func:`beginning` took from them.
    """
    if start is None:
        start = await beginning(parts)
    unpacker = _unpacker(start)
    if unpacker is None:
        _check_plain(start, name)
        if start:
            yield start
        async for part in parts:
            yield part
        return
    came = went = 0
    block = start
    while block:
        came += len(block)
        unpacker.take(block)
        while content := await in_thread(_step, unpacker, name):
            went += len(content)
            if went > limit_bytes:
                raise ObjectTooLarge(f"{name} is larger than {limit_bytes} bytes when decompressed")
            if went > max(_SURE_BYTES, came * _MOST_TIMES):
                raise LocationRefused(
                    f"{name}: {came} bytes of it decompress to more than {_MOST_TIMES} times as "
                    "many, which no file of requests does"
                )
            yield content
        block = await anext(parts, b"")
    if not unpacker.is_at_end:
        raise LocationRefused(f"{name} is cut off: its compressed data have no end")


def _check_plain(start: bytes, name: str) -> None:
    """Refuse a page of errors, say, that was saved under the name of the file."""
    if packed_suffix(name) and not start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        raise LocationRefused(
            f"{name} is neither compressed with gzip or zstd, as its name says, nor JSON Lines"
        )


def _step(unpacker: _Unpacker, name: str) -> bytes:
    try:
        return unpacker.step()
    except zlib.error as error:
        raise LocationRefused(f"{name} is damaged: it is not valid gzip") from error
    except zstd.ZstdError as error:
        if "memory" in str(error):
            raise LocationRefused(
                f"{name} needs a window of more than 8 MiB: compress it with zstd's level 19 or "
                "lower, and without --long"
            ) from error
        raise LocationRefused(f"{name} is damaged: it is not valid zstd") from error


async def packed(path: Path, name: str) -> AsyncGenerator[bytes]:
    """The file's content, packed as the end of ``name`` says: one of :data:`SUFFIXES`."""
    packer = (
        zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_FORMAT)
        if packed_suffix(name) == ".gz"
        else zstd.ZstdCompressor(level=_ZSTD_LEVEL)
    )
    async with contextlib.aclosing(read_file(path)) as blocks:
        async for block in blocks:
            if part := await in_thread(packer.compress, block):
                yield part
    yield await in_thread(packer.flush)
