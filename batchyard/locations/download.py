"""GET of a URL as one stream, however many connections it takes.

The stream is the whole object in one version, or it ends in an error: what cannot be told from
a truncated or a changed object is treated as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from yarl import URL

from batchyard.errors import (
    LocationRefused,
    ObjectChanged,
    ObjectTooLarge,
    StorageUnavailable,
)
from batchyard.locations.presigned import check_not_expired
from batchyard.locations.web import WebAccess, refusal, web_errors_as_ours
from batchyard.storage.blocks import BLOCK_BYTES
from batchyard.storage.compression import PACKED_ENCODINGS
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from collections.abc import Set as AbstractSet

    import aiohttp

MAX_REDIRECTS: Final = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


async def download(
    url: str, *, limit_bytes: int, web: WebAccess | None = None, may_be_packed: bool = False
) -> AsyncGenerator[bytes]:
    """Stream the object at ``url`` in blocks of 1 MiB; a broken connection is resumed.

    It is asked for as it is stored. ``may_be_packed``: if it is stored with ``Content-Encoding``
    gzip or zstd, its compressed bytes are the stream.

    Raises ``ObjectTooLarge`` over ``limit_bytes``, ``ObjectChanged`` when the object is another
    one on resuming, ``AccessDenied`` (401, 403, expired), ``ObjectNotFound``, ``LocationRefused``
    (redirect to another origin, compressed, no length) and ``StorageUnavailable`` after retries.
    """
    target = checked_url(url)
    check_not_expired(url)
    web = web or WebAccess()
    async with web.session() as session:
        encodings = {"identity", *(PACKED_ENCODINGS if may_be_packed else ())}
        transfer = _Transfer(session, target, limit_bytes, web, encodings)
        async with contextlib.aclosing(transfer.blocks()) as stream:
            async for block in stream:
                yield block


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells one version of an object from another."""

    etag: str
    modified: str
    total_bytes: int | None
    """``None`` while only a chunked answer was seen."""

    @classmethod
    def of(cls, response: aiohttp.ClientResponse) -> _Version:
        headers = response.headers
        return cls(
            headers.get("ETag", ""), headers.get("Last-Modified", ""), response.content_length
        )

    @property
    def condition(self) -> dict[str, str]:
        """The header that makes a Range request fail or start over when the object changed."""
        if self.etag and not self.etag.startswith("W/"):
            return {"If-Match": self.etag}
        return {"If-Range": self.modified} if self.modified else {}

    def is_named_by(self, response: aiohttp.ClientResponse) -> bool:
        """A server may overlook the condition, so its answer is compared as well."""
        other = _Version.of(response)
        if "If-Match" in self.condition:
            return other.etag == self.etag
        return (other.etag, other.modified) == (self.etag, self.modified)


class _Transfer:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        limit_bytes: int,
        web: WebAccess,
        encodings: AbstractSet[str],
    ) -> None:
        self._session = session
        self._url = url
        self._name = shown(str(url))
        self._limit_bytes = limit_bytes
        self._web = web
        self._encodings = encodings
        self._received_bytes = 0
        self._version: _Version | None = None

    async def blocks(self) -> AsyncGenerator[bytes]:
        block = bytearray()
        waits = self._web.backoff.waits()
        while True:
            try:
                async with self._answer() as response:
                    while await self._fill(block, response):
                        yield bytes(block)
                        block.clear()
                        # Only a whole block is progress: a server that sends a byte per
                        # connection would otherwise keep us for ever.
                        waits = self._web.backoff.waits()
                break
            except StorageUnavailable:
                wait = next(waits, None)
                if wait is None or not self._can_resume():
                    raise
                await asyncio.sleep(wait)
        if block:
            yield bytes(block)

    def _can_resume(self) -> bool:
        if self._received_bytes == 0:
            self._version = None
        return self._version is None or bool(self._version.condition)

    async def _fill(self, block: bytearray, response: aiohttp.ClientResponse) -> bool:
        """Read until the block is full (true) or the object ends (false)."""
        with web_errors_as_ours(self._name):
            async with asyncio.timeout(self._web.stall_seconds):
                while len(block) < BLOCK_BYTES:
                    piece = await response.content.read(BLOCK_BYTES - len(block))
                    if not piece:
                        break
                    block += piece
                    self._received_bytes += len(piece)
                    self._check_limit(self._received_bytes)
        if len(block) == BLOCK_BYTES:
            return True
        total_bytes = self._version.total_bytes if self._version else None
        if total_bytes is not None and self._received_bytes != total_bytes:
            raise StorageUnavailable(
                f"{self._name}: {self._received_bytes} of {total_bytes} bytes came"
            )
        return False

    def _check_limit(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise ObjectTooLarge(f"{self._name} is larger than {self._limit_bytes} bytes")

    @contextlib.asynccontextmanager
    async def _answer(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose body goes on where the last one broke."""
        url, asked = self._url, self._asked()
        most = 0 if self._web.guard else MAX_REDIRECTS
        for _ in range(most + 1):
            with web_errors_as_ours(self._name):
                # For the whole header: aiohttp's own limit begins anew with each byte.
                async with asyncio.timeout(self._web.stall_seconds):
                    response = await self._session.get(url, headers=asked, allow_redirects=False)
            async with response:
                if response.status in _REDIRECTS:
                    url = self._next_url(response)
                    continue
                await self._check(response)
                yield response
                return
        raise LocationRefused(f"{self._name} redirects more than {most} times: give the final URL")

    def _asked(self) -> dict[str, str]:
        if self._version is None:
            return {}
        return {"Range": f"bytes={self._received_bytes}-", **self._version.condition}

    def _next_url(self, response: aiohttp.ClientResponse) -> URL:
        try:
            there = response.url.join(URL(response.headers.get("Location", ""), encoded=True))
            is_same_origin = there.origin() == self._url.origin()
        except ValueError:
            is_same_origin = False
        if not is_same_origin:
            raise LocationRefused(f"{self._name} redirects to another host: give the final URL")
        return checked_url(str(there))

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if self._version is None:
            await self._check_first(response)
        else:
            await self._check_next(response, self._version)

    def _check_encoding(self, response: aiohttp.ClientResponse) -> None:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in self._encodings:
            ways = ", or with gzip or zstd" if len(self._encodings) > 1 else ""
            raise LocationRefused(f"{self._name} is sent compressed: store it uncompressed{ways}")

    def _check_has_end(self, response: aiohttp.ClientResponse) -> None:
        is_chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if response.content_length is None and not is_chunked:
            raise LocationRefused(
                f"{self._name}: the server gives no Content-Length, so a broken transfer would "
                "look complete"
            )

    async def _check_first(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise await refusal(response, self._name)
        self._check_encoding(response)
        self._check_has_end(response)
        self._check_limit(response.content_length or 0)
        self._version = _Version.of(response)

    async def _check_next(self, response: aiohttp.ClientResponse, version: _Version) -> None:
        changed = ObjectChanged(f"{self._name} changed while it was read: start again")
        if response.status in {404, 410, 412, 416}:
            raise changed
        if response.status not in {200, 206}:
            raise await refusal(response, self._name)
        if not version.is_named_by(response):
            raise changed
        self._check_encoding(response)
        if version.total_bytes is None:
            self._check_has_end(response)
        if response.status == 206:
            self._check_range(response.headers.get("Content-Range", ""), version, changed)
        else:
            await self._skip(response)

    def _check_range(self, content_range: str, version: _Version, changed: ObjectChanged) -> None:
        sent = _CONTENT_RANGE.fullmatch(content_range)
        if sent is None or int(sent[1]) != self._received_bytes:
            raise StorageUnavailable(f"{self._name}: the server sent another range than asked for")
        total_bytes = None if sent[3] == "*" else int(sent[3])
        if version.total_bytes is not None and total_bytes not in {None, version.total_bytes}:
            raise changed
        if total_bytes is not None and int(sent[2]) != total_bytes - 1:
            raise StorageUnavailable(f"{self._name}: the server sent a part of the range only")
        # The first answer may have come in chunks: then only this one says how long the whole is.
        self._version = replace(version, total_bytes=version.total_bytes or total_bytes)

    async def _skip(self, response: aiohttp.ClientResponse) -> None:
        """The server does not do ranges but still has the same object: pass over what we have."""
        left = self._received_bytes
        with web_errors_as_ours(self._name):
            while left:
                async with asyncio.timeout(self._web.stall_seconds):
                    left -= await self._skip_block(response, min(left, BLOCK_BYTES))

    async def _skip_block(self, response: aiohttp.ClientResponse, size_bytes: int) -> int:
        left = size_bytes
        while left:
            piece = await response.content.read(left)
            if not piece:
                raise StorageUnavailable(f"{self._name}: fewer bytes than before came")
            left -= len(piece)
        return size_bytes
