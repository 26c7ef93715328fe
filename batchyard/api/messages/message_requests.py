"""The body that creates a Message Batch, turned into the lines of a batch as it arrives.

The body is one JSON object with an array of up to hundreds of megabytes, of which no more than one
request is held in memory. The lines go to a temporary file, because a batch is only created if each
has a ``custom_id`` of its own. What else is wrong with a request is found when the batch is
validated.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgspec

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.array_elements import ArrayElements, request_too_large
from batchyard.api.http.body import body_stream
from batchyard.api.http.message_errors import MESSAGES
from batchyard.lines.duplicates import duplicate_lines
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_thread
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from batchyard.services.services import Services
    from batchyard.settings import Settings

CUSTOM_ID_PATTERN: Final = "^[a-zA-Z0-9_-]{1,64}$"
_PART_BYTES: Final = 1024**2
_BODIES: Final = TenantTurns(None, of_each=8)
"""Large bodies of one tenant at a time: its others wait, so that none fills everybody's memory.

Each that is received may hold one request of ``max_line_bytes``, which has not ended yet.
"""
_is_custom_id = re.compile(r"[a-zA-Z0-9_-]{1,64}").fullmatch


class MessageLines:
    """A temporary file with a batch's lines, and how many they are."""

    def __init__(self, file: BinaryIO, settings: Settings) -> None:
        self.file = file
        self.count = 0
        self._limits = settings.limits.to_limits(of_client=True)
        self._elements = ArrayElements(self._limits.max_line_bytes)

    def add(self, data: bytes) -> None:
        """Take in the next bytes of the body. Raises 400 and 413."""
        for element in self._elements.feed(data):
            if self.count == self._limits.max_requests:
                raise _invalid(f"requests: at most {self._limits.max_requests} are possible here.")
            line = _line(self.count, element)
            if len(line) > self._limits.max_line_bytes:
                # Its result would lack the custom_id, which is not read in a line that long.
                raise request_too_large(self.count, self._limits.max_line_bytes)
            self.file.write(line)
            self.count += 1

    def finish(self) -> None:
        """Check what can only be known of the whole. Raises 400."""
        self._elements.finish()
        if not self.count:
            raise _invalid("requests: at least one is required.")
        self.file.seek(0)
        for number in duplicate_lines(self.file, self._limits):
            where = f"requests.{number - 1}.custom_id"
            raise _invalid(f"{where}: an earlier request has the same one.")

    def parts(self) -> AsyncIterator[bytes]:
        """The lines' bytes."""
        return _parts(self.file)


@asynccontextmanager
async def read_lines(
    request: Request, services: Services, tenant: str
) -> AsyncIterator[MessageLines]:
    """The lines of the batch that the request asks for, each with a ``custom_id`` of its own.

    Raises 400, 408, 413 and 415, and :class:`~batchyard.errors.StorageError`.
    """
    settings = services.settings
    most_bytes = settings.limits.max_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise _too_large(most_bytes)
    with ExitStack() as closing:
        with os_errors_as_ours(str(services.spool)):
            spool = closing.enter_context(tempfile.TemporaryFile(dir=services.spool))
            lines = MessageLines(cast("BinaryIO", spool), settings)
            async with _BODIES.turn(tenant), aclosing(body_stream(request)) as body:
                await _receive(body, lines, most_bytes)
            await in_thread(lines.finish)
        yield lines


async def _receive(body: AsyncIterator[bytes], lines: MessageLines, most_bytes: int) -> None:
    received_bytes = 0
    async for part in _larger(body):
        received_bytes += len(part)
        if received_bytes > most_bytes:
            raise _too_large(most_bytes)
        await in_thread(lines.add, part)


async def _larger(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in parts that are worth a thread."""
    held = bytearray()
    async for part in parts:
        held += part
        if len(held) >= _PART_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    while part := await in_thread(file.read, _PART_BYTES):
        yield part


# -- one request -------------------------------------------------------------------------------


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


_decode = msgspec.json.Decoder(_Request).decode


def _line(index: int, element: bytes) -> bytes:
    """The line of a request. ``params`` are written as they came, but for line ends."""
    try:
        if not element.isascii():
            element.decode()
        if b"\n" in element or b"\r" in element:
            element = msgspec.json.format(element, indent=-1)
        request = _decode(element)
    except UnicodeDecodeError:
        raise _invalid(f"requests.{index}: it is not UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise _invalid(f"requests.{index}: {error}.") from None
    if not _is_custom_id(request.custom_id):
        raise _invalid(f"requests.{index}.custom_id: it must match {CUSTOM_ID_PATTERN}.")
    return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (
        request.custom_id.encode(),
        MESSAGES.encode(),
        bytes(request.params),
    )


def _invalid(message: str) -> ApiError:
    return ApiError(400, message)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"The body of a Message Batch may have {most_bytes} bytes here.")
