"""The files that requests name as ``file_url``: fetched, and sent to the engine within a form.

The runner fetches them, not the engine, so that addresses are checked when they are connected to,
and a server's failure fails only its own line. Engines get the bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import msgspec

from batchyard.errors import (
    EngineError,
    LocationRefused,
    ObjectTooLarge,
    StorageError,
    StorageUnavailable,
)
from batchyard.lines.forms import is_data_url, make_form, named_by_url, read_data_url
from batchyard.locations.download import download
from batchyard.logs import event_logger
from batchyard.processes.threads import in_thread
from batchyard.results.results import NoAnswerCode, unanswered, unprocessed
from batchyard.storage.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.lines.forms import AttachedFile, Form
    from batchyard.locations.web import WebAccess
    from batchyard.runner.window.admission import Admission
    from batchyard.runner.window.room import FileBudget
    from batchyard.runner.window.window_request import WindowRequest

    _Send = Callable[[WindowRequest], Awaitable[None]]

log = event_logger(__name__)

MAX_FILE_BYTES: Final = 25 * 1024**2
"""OpenAI's limit for audio."""
_FETCH_SECONDS = 60.0
"""For one file, all attempts together: a request that waits for it delays the next chunk."""
_FAILURES_OF_A_HOST = 5
"""A host that failed this often is not asked again for this chunk: each time costs a minute."""

_decode = msgspec.json.Decoder().decode


def file_access(web: WebAccess) -> WebAccess:
    """``web`` with the time limits for files: a slow server fails the line."""
    return replace(web, stall_seconds=20.0, backoff=Backoff(attempts=3))


class Attachments:
    """The requests of one chunk that name files, on their way into the window.

    With its file, each waits for the chunk's turn, as do requests without files; ``send`` puts it
    into the window then. An async context manager; its end waits until every request is in the
    window or has its result, and raises what the window raised. An error in the block ends all
    fetches.
    """

    def __init__(self, room: FileBudget, admission: Admission, send: _Send, web: WebAccess) -> None:
        self._room = room
        self._admission = admission
        self._send = send
        self._web = web
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: Counter[str | None] = Counter()
        self.without_files = 0
        """How many requests wait for room for their file, or for the file itself."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, request: WindowRequest, prompt: Callable[[], bytes] = bytes) -> None:
        """Wait for room for a file and begin to fetch it. The window gets the request later.

        ``prompt`` gives what the request's prompt begins with.
        """
        self.without_files += 1
        try:
            await self._room.take(MAX_FILE_BYTES, is_background=self._admission.is_background)
        except BaseException:
            self.without_files -= 1
            raise
        self._tasks.add(asyncio.create_task(self._attach(request, prompt)))
        # It begins before our caller can end it: one that never begins gives no room back.
        await asyncio.sleep(0)

    async def _attach(self, request: WindowRequest, prompt: Callable[[], bytes]) -> None:
        room = self._room
        held_bytes = MAX_FILE_BYTES
        try:
            try:
                form = await self._form_of(request)
            finally:
                self.without_files -= 1
            if form is not None:
                request.body, request.content_type = form.body, form.content_type
            room.give_back(held_bytes - len(request.body))
            held_bytes = request.file_bytes = len(request.body)
            await self._admission.submit(partial(self._send, request), prompt)
            # From here on the window gives it back, as the request leaves it.
            held_bytes = 0
        except StorageError as error:
            code = NoAnswerCode.FILE_UNAVAILABLE
            request.deliver(request.ordinal, unanswered(request.custom_id, code, f"{error}."))
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is about this line only
            reason = type(error).__name__
            log.warning("attachment.failed", reason, ordinal=request.ordinal)
            message = f"Batchyard could not attach the file that this line names ({reason})."
            request.deliver(request.ordinal, unprocessed(request.custom_id, message))
        finally:
            room.give_back(held_bytes)

    async def _form_of(self, request: WindowRequest) -> Form | None:
        """The request as a form; None where its body names no file and goes as it is."""
        fields: dict[str, Any] = await in_thread(_decode, request.body)
        if "file_url" not in fields:
            return None
        file = await self._file_at(fields["file_url"])
        return await in_thread(make_form, request.url, fields, file)

    async def _file_at(self, url: str) -> AttachedFile:
        if is_data_url(url):
            return await in_thread(_file_within, url)
        try:
            host = urlsplit(url).hostname
            if self._failures[host] >= _FAILURES_OF_A_HOST:
                raise StorageUnavailable("its server failed for too many other lines")
            return named_by_url(url, await self._fetch(url, host))
        except ValueError:
            # Its text may quote the URL.
            raise LocationRefused("it is not a URL: check host and port") from None

    async def _fetch(self, url: str, host: str | None) -> bytes:
        blocks = bytearray()
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                async for block in download(url, limit_bytes=MAX_FILE_BYTES, web=self._web):
                    blocks += block
        except StorageUnavailable:
            self._failures[host] += 1
            raise
        except TimeoutError:
            self._failures[host] += 1
            raise StorageUnavailable(
                f"it was not fetched within {_FETCH_SECONDS:.0f} seconds"
            ) from None
        return bytes(blocks)


def _file_within(url: str) -> AttachedFile:
    try:
        file = read_data_url(url)
    except ValueError as error:
        raise LocationRefused(str(error)) from None
    if len(file.data) > MAX_FILE_BYTES:
        raise ObjectTooLarge(f"it is larger than {MAX_FILE_BYTES} bytes")
    return file
