"""PUT of a local file to URLs, as S3 wants it: with its length, and nothing unsigned."""

from __future__ import annotations

import asyncio
import math
import os
from html import escape
from typing import TYPE_CHECKING, Final

from batchyard.errors import ObjectTooLarge, StorageUnavailable
from batchyard.locations.presigned import (
    S3_PUT_LIMIT_BYTES,
    check_not_expired,
    creates_only,
    post_headers,
    put_headers,
    signature_of,
)
from batchyard.locations.put_answers import is_there_already, put_refused
from batchyard.locations.web import WebAccess, error_code, refused, web_errors_as_ours
from batchyard.processes.threads import in_thread
from batchyard.storage.blocks import MIB
from batchyard.storage.file import os_errors_as_ours, read_file
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import aiohttp

_LEAST_PART_BYTES: Final = 8 * MIB
"""S3 takes no part below 5 MiB but the last one."""
_ANSWER_BYTES: Final = 64 * 1024
_COMPLETE_SECONDS: Final = 600.0
"""For the answer to all tries of it: S3 takes minutes for thousands of parts."""
_FORGOTTEN: Final = (404, "NoSuchUpload")
"""What S3 and servers like it say of an upload that is complete, and of one that was aborted."""
_OUTCOME_UNKNOWN: Final = {500, 502, 504}
"""What a server says that failed midway, and a proxy that lost the server's answer."""


async def upload(url: str, path: Path, *, web: WebAccess | None = None) -> None:
    """Store the file under ``url``; sent again after 408, 429, 5xx, time-outs and broken
    connections, for a PUT that arrives twice leaves the same object.

    Raises ``AccessDenied`` (401, 403, expired), ``ObjectTooLarge`` (over 5 GiB for S3, 413),
    ``LocationRefused`` (redirect, headers we cannot know) and ``StorageUnavailable`` after retries.
    """
    name = shown(str(checked_url(url)))
    size_bytes = await _size(path)
    signature = signature_of(url)
    most_bytes = signature.most_bytes if signature else None
    if most_bytes is not None and size_bytes > most_bytes:
        raise ObjectTooLarge(
            f"{path.name} has {size_bytes} bytes, and {name} takes {most_bytes} in one PUT: "
            "give URLs of parts, write to s3:// (or az://, gs://), or split the batch"
        )
    await _put(url, path, 0, size_bytes, web or WebAccess())


async def upload_parts(
    part_urls: Sequence[str], complete_url: str, path: Path, *, web: WebAccess | None = None
) -> None:
    """Store the file as a multipart upload of S3 that a client has begun.

    The file is cut evenly, into as many parts as there are URLs or fewer. A part that fails is
    sent again by itself. Raises as :func:`upload`.
    """
    web = web or WebAccess()
    size_bytes = await _size(path)
    if size_bytes > len(part_urls) * S3_PUT_LIMIT_BYTES:
        raise ObjectTooLarge(
            f"{path.name} has {size_bytes} bytes, and {len(part_urls)} parts take "
            f"{S3_PUT_LIMIT_BYTES} each: give more URLs"
        )
    part_bytes = max(_LEAST_PART_BYTES, math.ceil(size_bytes / len(part_urls)))
    etags = []
    for start, url in zip(range(0, max(1, size_bytes), part_bytes), part_urls, strict=False):
        stop = min(start + part_bytes, size_bytes)
        etags.append(await _put(url, path, start, stop, web))
    await _complete(complete_url, etags, web)


async def _size(path: Path) -> int:
    with os_errors_as_ours(str(path)):
        return (await in_thread(os.stat, path)).st_size


async def _put(url: str, path: Path, start: int, stop: int, web: WebAccess) -> str:
    """Send a slice of the file; the ETag that it got."""
    import aiohttp  # noqa: PLC0415 - most commands go to no URL, and it takes long

    target, name = checked_url(url), shown(url)
    headers = {**put_headers(url), "Content-Length": str(stop - start)}
    may_be_stored = False

    async def send() -> str:
        nonlocal may_be_stored
        check_not_expired(url)
        is_sent = False

        async def body() -> AsyncIterator[bytes]:
            """The slice, each block with its own time: aiohttp has no limit while it sends."""
            nonlocal is_sent
            async for block in read_file(path, start=start, stop=stop):
                yield block
                stall.reschedule(asyncio.get_running_loop().time() + web.stall_seconds)
            is_sent = True

        async with web.session() as session:
            with web_errors_as_ours(name):
                try:
                    async with (
                        asyncio.timeout(web.stall_seconds) as stall,
                        session.put(
                            target,
                            data=body(),
                            headers=headers,
                            # So that the body is sent only where there is no such blob, and one
                            # that is there after a lost answer is ours.
                            expect100=creates_only(url),
                            skip_auto_headers=("Content-Type",),
                            allow_redirects=False,
                        ) as response,
                    ):
                        if _is_success(response):
                            return response.headers.get("ETag", "")
                        code = await error_code(response)
                        if may_be_stored and is_there_already(url, code):
                            return ""
                        may_be_stored |= is_sent and response.status in _OUTCOME_UNKNOWN
                        raise put_refused(response, url, code)
                except (aiohttp.ClientError, OSError):
                    may_be_stored |= is_sent
                    raise

    return await web.backoff.retry(send)


async def _complete(url: str, etags: Sequence[str], web: WebAccess) -> None:
    """Have S3 make the object of its parts."""
    import aiohttp  # noqa: PLC0415 - most commands go to no URL, and it takes long

    target, name = checked_url(url), shown(url)
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag, quote=False)}</ETag></Part>"
        for number, etag in enumerate(etags, start=1)
    )
    headers = post_headers(url)
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    clock = asyncio.get_running_loop().time
    ends_at = clock() + _COMPLETE_SECONDS
    may_be_complete = False

    async def send() -> None:
        nonlocal may_be_complete
        check_not_expired(url)
        async with web.session() as session:
            with web_errors_as_ours(name):
                try:
                    async with (
                        # The last tries need no long time: S3 says at once what it has done.
                        asyncio.timeout_at(max(ends_at, clock() + web.stall_seconds)),
                        session.post(
                            target,
                            data=body,
                            headers=headers,
                            skip_auto_headers=("Content-Type",),
                            allow_redirects=False,
                        ) as response,
                    ):
                        if not _is_success(response):
                            code = await error_code(response)
                            # S3 forgets an upload that is complete: only the answer was lost.
                            if may_be_complete and (response.status, code) == _FORGOTTEN:
                                return
                            may_be_complete |= response.status in _OUTCOME_UNKNOWN
                            raise refused(response, name, code)
                        answer = await _whole_answer(response)
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                    # Nothing was sent.
                    raise
                except (aiohttp.ClientError, OSError):
                    may_be_complete = True
                    raise
                # S3 may find out that it failed after it has begun to answer 200.
                if b"<Error>" in answer:
                    raise StorageUnavailable(f"{name}: the parts could not be put together")

    await web.backoff.retry(send)


async def _whole_answer(response: aiohttp.ClientResponse) -> bytes:
    """To its end, which S3 may send minutes later: until then it sends spaces."""
    answer = bytearray()
    # One read returns what has arrived by then, and the error comes last.
    while len(answer) < _ANSWER_BYTES and (piece := await response.content.read(_ANSWER_BYTES)):
        answer += piece
    return bytes(answer)


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300
