"""What a user may write for IN and OUT: a path, ``s3://bucket/key`` or an http(s) URL.

::

    source = parse_location("s3://in/batch.jsonl")
    async for block in read_location(source, limit_bytes=200 * MIB, s3=credentials): ...
    await write_location(parse_location("out.jsonl"), results)
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from batchyard.errors import AccessDenied, LocationRefused, ObjectNotFound, ObjectTooLarge
from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.download import download
from batchyard.storage.file import os_errors_as_ours, read_file, write_file
from batchyard.storage.presigned import check_not_expired, put_headers
from batchyard.storage.upload import upload
from batchyard.threads import in_thread
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from batchyard.storage.web import WebAccess

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A path on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class S3Object:
    """An object that is read and written with our credentials."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A URL that needs nothing but itself, presigned or public."""

    url: str = field(repr=False)
    """The whole URL: a secret when presigned. ``str()`` of this object leaves its query out."""

    def __str__(self) -> str:
        return shown(self.url)


Location: TypeAlias = LocalFile | S3Object | WebUrl


def parse_location(text: str) -> Location:
    """Say what kind of place ``text`` names; whether it exists, nobody looks yet.

    Raises :class:`~batchyard.errors.LocationRefused`.
    """
    if not text or "\0" in text:
        raise LocationRefused("give a path, s3://bucket/key, or an http(s) URL")
    named = _SCHEME.match(text)
    if named is None:
        return LocalFile(Path(text))
    match scheme := named[1].lower():
        case "http" | "https":
            checked_url(text)
            return WebUrl(text)
        case "s3":
            bucket, _, key = text[named.end() :].partition("/")
            if not bucket or not key:
                raise LocationRefused(f"{text} names no object: write s3://bucket/key")
            return S3Object(bucket, key)
        case _:
            raise LocationRefused(
                f"{scheme}:// is not supported: use a plain path, s3://bucket/key, or http(s)://"
            )


async def read_location(
    location: Location,
    *,
    limit_bytes: int,
    s3: S3Credentials | None = None,
    web: WebAccess | None = None,
) -> AsyncGenerator[bytes]:
    """Stream the whole content in blocks of up to 1 MiB.

    Raises :class:`~batchyard.errors.ObjectTooLarge` over ``limit_bytes``, and what else
    :mod:`batchyard.errors` lists for storage; a stream that ends without an error is complete.
    """
    match location:
        case LocalFile(path):
            stream = _read_local(path)
        case S3Object(bucket, key):
            stream = _read_s3(bucket, key, s3)
        case WebUrl(url):
            stream = download(url, limit_bytes=limit_bytes, web=web)
        case _:
            assert_never(location)
    received_bytes = 0
    async with contextlib.aclosing(stream):
        async for block in stream:
            received_bytes += len(block)
            if received_bytes > limit_bytes:
                raise ObjectTooLarge(f"{location} is larger than {limit_bytes} bytes")
            yield block


async def _read_local(path: Path) -> AsyncGenerator[bytes]:
    with os_errors_as_ours(str(path)):
        if await in_thread(path.is_dir):
            raise LocationRefused(f"{path} is a directory: give a file")
        if await in_thread(path.exists) and not await in_thread(path.is_file):
            raise LocationRefused(f"{path} is a pipe or a device: save it to a file first")
    async with contextlib.aclosing(read_file(path)) as stream:
        async for block in stream:
            yield block


async def _read_s3(bucket: str, key: str, s3: S3Credentials | None) -> AsyncGenerator[bytes]:
    async with (
        _connected(bucket, s3) as connected,
        contextlib.aclosing(connected.read(key)) as stream,
    ):
        async for block in stream:
            yield block


@contextlib.asynccontextmanager
async def _connected(bucket: str, s3: S3Credentials | None) -> AsyncIterator[S3Bucket]:
    connected = await in_thread(S3Bucket, bucket, s3)
    try:
        yield connected
    finally:
        await connected.close()


async def check_output(location: Location) -> None:
    """Find out before hours of work what can be known about writing there; creates nothing.

    Raises :class:`~batchyard.errors.ObjectNotFound` (no such folder),
    :class:`~batchyard.errors.LocationRefused` or :class:`~batchyard.errors.AccessDenied`.
    """
    match location:
        case LocalFile(path):
            await in_thread(_check_target, path)
        case WebUrl(url):
            check_not_expired(url)
            put_headers(url)
        case S3Object():
            """Only a write tells."""
        case _:
            assert_never(location)


def _check_target(path: Path) -> None:
    with os_errors_as_ours(str(path)):
        folder = path.resolve().parent
        if not folder.is_dir():
            raise ObjectNotFound(f"the folder {folder} does not exist: create it first")
        if path.is_dir():
            raise LocationRefused(f"{path} is a directory: give a file")
        if path.exists() and not path.is_file():
            # Taking its name would replace the device itself.
            raise LocationRefused(f"{path} is a pipe or a device: give a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AccessDenied(f"not allowed to write into {folder}: check its owner and mode")


async def write_location(
    location: Location,
    path: Path,
    *,
    s3: S3Credentials | None = None,
    web: WebAccess | None = None,
) -> None:
    """Copy the local file ``path`` there. What was there before stays until the copy is whole."""
    await check_output(location)
    match location:
        case WebUrl(url):
            await upload(url, path, web=web)
        case LocalFile(target):
            async with contextlib.aclosing(read_file(path)) as parts:
                # Through a symbolic link, not in place of it.
                await write_file(target.resolve(), parts, name=str(target))
        case S3Object(bucket, key):
            async with (
                _connected(bucket, s3) as connected,
                contextlib.aclosing(read_file(path)) as parts,
            ):
                await connected.write(key, parts)
        case _:
            assert_never(location)
