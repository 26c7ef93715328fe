"""PUT of a local file to a URL, as S3 wants it: with its length, and nothing unsigned."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from batchyard.errors import ObjectTooLarge
from batchyard.storage.file import os_errors_as_ours, read_file
from batchyard.storage.presigned import check_not_expired, put_headers, signature_of
from batchyard.storage.web import WebAccess, refusal, web_errors_as_ours
from batchyard.threads import in_thread
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

S3_PUT_LIMIT_BYTES: Final = 5 * 1024**3
"""The most that S3 takes in one PUT."""


async def upload(url: str, path: Path, *, web: WebAccess | None = None) -> None:
    """Store the file under ``url``; sent again after 408, 429, 5xx, time-outs and broken
    connections, for a PUT that arrives twice leaves the same object.

    Raises ``AccessDenied`` (401, 403, expired), ``ObjectTooLarge`` (over 5 GiB for S3, 413),
    ``LocationRefused`` (redirect, headers we cannot know) and ``StorageUnavailable`` after retries.
    """
    web = web or WebAccess()
    target, name = checked_url(url), shown(url)
    with os_errors_as_ours(str(path)):
        size_bytes = (await in_thread(os.stat, path)).st_size
    signature = signature_of(url)
    if signature is not None and signature.is_s3 and size_bytes > S3_PUT_LIMIT_BYTES:
        raise ObjectTooLarge(
            f"{path} has {size_bytes} bytes, and S3 takes {S3_PUT_LIMIT_BYTES} in one PUT: "
            "split the batch, or write to s3://"
        )
    headers = {**put_headers(url), "Content-Length": str(size_bytes)}

    async def send() -> None:
        check_not_expired(url)
        async with web.session() as session:
            with web_errors_as_ours(name):
                async with (
                    asyncio.timeout(web.stall_seconds) as stall,
                    session.put(
                        target,
                        data=_body(path, stall, web.stall_seconds),
                        headers=headers,
                        skip_auto_headers=("Content-Type",),
                        allow_redirects=False,
                    ) as response,
                ):
                    if not response.ok or response.status >= 300:
                        raise await refusal(response, name)

    await web.backoff.retry(send)


async def _body(path: Path, stall: asyncio.Timeout, seconds: float) -> AsyncIterator[bytes]:
    """The file, each block of which gets its own time: aiohttp has no limit while it sends."""
    async for block in read_file(path):
        yield block
        stall.reschedule(asyncio.get_running_loop().time() + seconds)
