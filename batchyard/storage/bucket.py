"""One S3 bucket: objects streamed in and out with bounded memory, whatever the connection does.

Knows raw S3 keys; :mod:`batchyard.storage.s3` makes a Storage of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from batchyard.errors import (
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageUnavailable,
)
from batchyard.processes.threads import in_executor
from batchyard.storage.backoff import Backoff
from batchyard.storage.base import ListedObject
from batchyard.storage.blocks import BLOCK_BYTES, MIB, Tally, blocks
from batchyard.storage.s3_errors import s3_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
    from pathlib import Path

    from batchyard.storage.base import StoredObject

PART_BYTES: Final = 8 * MIB
_MOST_PARTS: Final = 10_000
_PARTS_OF_ONE_SIZE: Final = 9_000
"""S3 takes 10,000 parts. R2 wants all of one size, and gets that for objects of up to 70 GiB."""
_JOINED: Final = 32
"""Later parts are so many times as large, which makes 320 GiB."""

_ALWAYS_SAID: Final = {
    "head_object": "ContentLength",
    "put_object": "ETag",
    "upload_part": "ETag",
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "create_multipart_upload": "UploadId",
    "complete_multipart_upload": "ETag",
}
"""What an answer always has. A body that is lost whole is an empty answer for boto3, and an empty
listing would mean that nothing is stored. Headers are lost where a proxy changes answers."""

_CONCURRENT_CALLS = 8
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_ABORT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Where the S3 server is and who we are there; what is empty is left to boto3's own chain."""

    endpoint_url: str = ""
    """The address of the S3 service; empty: AWS itself."""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    ca_file: Path | None = None
    """The certificate authorities to trust, in PEM; None: boto3's."""

    def client(self) -> Any:
        """A boto3 client. Takes a few 100 ms, and seconds where the chain asks the network."""
        # A tenth of what a command imports, and many have no S3 store.
        import boto3  # noqa: PLC0415 - see above
        from botocore.config import Config  # noqa: PLC0415 - see above

        session = boto3.session.Session(
            aws_access_key_id=self.access_key_id or None,
            aws_secret_access_key=self.secret_access_key or None,
            aws_session_token=self.session_token or None,
            region_name=self.region or None,
        )
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=_CONCURRENT_CALLS,
            retries={"total_max_attempts": 1},  # Backoff retries, and says so in one place
            # boto3's newer default adds trailing checksums that other servers do not know.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Few servers other than AWS have a host name for every bucket.
            s3={"addressing_style": "path" if self.endpoint_url else "auto"},
        )
        return session.client(
            "s3",
            endpoint_url=self.endpoint_url or None,
            verify=str(self.ca_file) if self.ca_file else None,
            config=config,
        )


class S3Bucket:
    """Reads, writes, lists and deletes. Every call is retried while S3 is unavailable.

    The bucket must exist. Building this loads boto3's models (a few 100 ms), so it is built once,
    at start, or in a thread.
    """

    def __init__(
        self,
        name: str,
        credentials: S3Credentials | None = None,
        *,
        part_bytes: int = PART_BYTES,
        backoff: Backoff | None = None,
    ) -> None:
        self._name = name
        self._part_bytes = part_bytes
        self._backoff = backoff or Backoff()
        # Our own threads: slow transfers must not hold up those that asyncio resolves names in.
        self._threads = ThreadPoolExecutor(_CONCURRENT_CALLS, thread_name_prefix=f"s3-{name}")
        try:
            with s3_errors_as_ours(f"s3://{name}"):
                self._client = (credentials or S3Credentials()).client()
        except ValueError as error:
            raise LocationRefused(
                f"s3://{name}: the endpoint is not a URL, give one such as https://s3.example.org"
            ) from error

    def shown(self, key: str) -> str:
        """The object's address, for messages."""
        return f"s3://{self._name}/{key}"

    async def write(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Store ``parts`` under ``key``: one request when they are few, else a multipart upload.

        Holds about three parts in memory. A failure or a cancellation aborts the upload, so that
        no invisible parts stay behind and cost money. Raises
        :class:`~batchyard.errors.ObjectTooLarge` beyond 320 GiB.
        """
        tally = Tally()
        async with contextlib.aclosing(blocks(parts, self._part_bytes)) as stream:
            block = await anext(stream, b"")
            if len(block) < self._part_bytes:
                await self._send(tally, block, "put_object", Key=key)
                return tally.stored(key)
            async with self._multipart(key, tally) as (upload, etags):
                while block:
                    number = len(etags) + 1
                    if number > _MOST_PARTS:
                        raise ObjectTooLarge(f"{self.shown(key)} has more parts than S3 takes")
                    if number > _PARTS_OF_ONE_SIZE:
                        block = await _joined(block, stream)
                    etags.append(
                        await self._send(tally, block, "upload_part", **upload, PartNumber=number)
                    )
                    block = await anext(stream, b"")
        return tally.stored(key)

    @contextlib.asynccontextmanager
    async def _multipart(
        self, key: str, tally: Tally
    ) -> AsyncIterator[tuple[dict[str, Any], list[str]]]:
        """An open upload and the list for its parts' ETags; complete, or aborted, at the end."""
        opened = await self._call("create_multipart_upload", undo=self._abort, Key=key)
        upload: dict[str, Any] = {"Key": key, "UploadId": opened["UploadId"]}
        etags: list[str] = []
        try:
            yield upload, etags
            await self._complete(upload, etags, tally.size_bytes)
        except BaseException:
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._call("abort_multipart_upload", **upload)
            raise

    async def _complete(self, upload: dict[str, Any], etags: list[str], size_bytes: int) -> None:
        """Have S3 make the object of its parts, which takes long for many."""
        parts = [{"ETag": etag, "PartNumber": n} for n, etag in enumerate(etags, start=1)]
        may_be_complete = False

        async def attempt() -> None:
            nonlocal may_be_complete
            try:
                await self._call_once(
                    "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}
                )
            except StorageUnavailable as error:
                if _code_of(error) != "NoSuchUpload":
                    may_be_complete = True
                # S3 forgets an upload that is complete: perhaps only the answer was lost.
                elif may_be_complete and await self._has(upload["Key"], size_bytes):
                    return
                raise

        await self._backoff.retry(attempt)

    async def _has(self, key: str, size_bytes: int) -> bool:
        try:
            return await self.size(key) == size_bytes
        except ObjectNotFound:
            return False

    def _abort(self, opened: dict[str, str]) -> None:
        """Give up an upload whose opener was cancelled. Blocks."""
        self._client.abort_multipart_upload(
            Bucket=opened["Bucket"], Key=opened["Key"], UploadId=opened["UploadId"]
        )

    async def _send(self, tally: Tally, block: bytes, operation: str, **more: Any) -> str:
        """Upload one body, with its MD5 so that S3 refuses what was damaged on the way."""
        digest = await in_executor(self._threads, partial(_counted, tally, block))
        reply = await self._call(operation, Body=block, ContentMD5=digest, **more)
        return str(reply["ETag"])

    async def read(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Stream bytes ``start`` to ``stop``; a broken connection is resumed where it broke.

        Raises :class:`~batchyard.errors.ObjectChanged` when the object was replaced meanwhile.
        """
        if stop is not None and stop <= start:
            await self.size(key)  # an absent object is an error, however little is asked of it
            return
        etag: str | None = None
        waits = self._backoff.waits()
        while True:
            try:
                reply = await self._open(key, start, stop, etag)
                if reply is None:
                    return
                etag, stop = reply["ETag"], start + reply["ContentLength"]
                with contextlib.closing(reply["Body"]) as body:
                    while start < stop:
                        block = await self._read_block(key, body)
                        start += len(block)
                        waits = self._backoff.waits()
                        yield block
            except StorageUnavailable:
                if (wait := next(waits, None)) is None:
                    raise
                await asyncio.sleep(wait)
            else:
                return

    async def _open(self, key: str, start: int, stop: int | None, etag: str | None) -> Any:
        """Start a download at ``start``; ``None`` when the object ends before that."""
        asked: dict[str, str] = {} if etag is None else {"IfMatch": etag}
        if start or stop is not None:
            asked["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            reply = await self._call_once("get_object", undo=_hang_up, Key=key, **asked)
        except StorageError as error:
            if etag is not None and isinstance(error, ObjectNotFound):
                raise ObjectChanged(f"{self.shown(key)} was removed while it was read") from error
            if etag is None and _code_of(error) == "InvalidRange":
                return None
            raise
        length = reply.get("ContentLength")
        if length is None or "ETag" not in reply:
            _hang_up(reply)
            raise StorageUnavailable(
                f"{self.shown(key)}: S3's answer lacks Content-Length or ETag, so that a broken "
                "transfer would look complete: check for a proxy that removes them"
            )
        as_asked = reply.get("ContentRange", "bytes 0-").startswith(f"bytes {start}-")
        if stop is not None:
            # Only the first answer may be shorter than asked: there the object ends.
            as_asked &= length == stop - start if etag else length <= stop - start
        if not as_asked:
            _hang_up(reply)
            raise StorageUnavailable(f"{self.shown(key)}: S3 sent another range than asked for")
        return reply

    async def _read_block(self, key: str, body: Any) -> bytes:
        with s3_errors_as_ours(self.shown(key)):
            block: bytes = await in_executor(self._threads, partial(body.read, BLOCK_BYTES))
        if not block:
            raise StorageUnavailable(f"{self.shown(key)}: S3 stopped sending too early")
        return block

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        return int((await self._call("head_object", Key=key))["ContentLength"])

    async def delete(self, key: str) -> None:
        """Remove the object, if it is there."""
        with contextlib.suppress(ObjectNotFound):
            await self._call("delete_object", Key=key)

    async def list(self, prefix: str) -> AsyncGenerator[str]:
        """Every key that starts with ``prefix``, in byte order, fetched page by page."""
        async with contextlib.aclosing(self.listing(prefix)) as entries:
            async for entry in entries:
                yield entry.key

    async def listing(self, prefix: str) -> AsyncGenerator[ListedObject]:
        """List what :meth:`list` does, with sizes, ages and ETags."""
        more: dict[str, Any] = {}
        while True:
            page = await self._call("list_objects_v2", Prefix=prefix, **more)
            for entry in page.get("Contents", ()):
                age_seconds = _age_seconds(page, entry["LastModified"])
                yield ListedObject(
                    str(entry["Key"]), entry["Size"], age_seconds, str(entry["ETag"])
                )
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def abort_uploads(self, prefix: str, older_than_seconds: float) -> int:
        """Give up multipart uploads of keys below ``prefix`` that were begun so long ago."""
        aborted = 0
        more: dict[str, Any] = {}
        while True:
            page = await self._call("list_multipart_uploads", Prefix=prefix, **more)
            for upload in page.get("Uploads", ()):
                if _age_seconds(page, upload["Initiated"]) >= older_than_seconds:
                    aborted += await self._abort_once(upload["Key"], upload["UploadId"])
            if not page.get("IsTruncated"):
                return aborted
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    async def _abort_once(self, key: str, upload_id: str) -> bool:
        # It may have ended meanwhile, which looks like S3 having lost it. Tried once: if S3 really
        # is away, the next call will find the upload again.
        with contextlib.suppress(ObjectNotFound, StorageUnavailable):
            await self._call_once("abort_multipart_upload", Key=key, UploadId=upload_id)
            return True
        return False

    async def close(self) -> None:
        """Release threads and connections."""
        self._threads.shutdown(wait=False)
        self._client.close()

    async def _call(
        self, operation: str, *, undo: Callable[[Any], object] | None = None, **asked: Any
    ) -> Any:
        """One boto3 operation, tried again while S3 is unavailable."""
        return await self._backoff.retry(partial(self._call_once, operation, undo=undo, **asked))

    async def _call_once(
        self, operation: str, *, undo: Callable[[Any], object] | None = None, **asked: Any
    ) -> Any:
        method = partial(getattr(self._client, operation), Bucket=self._name, **asked)
        name = self.shown(asked.get("Key", ""))
        with s3_errors_as_ours(name):
            reply = await in_executor(self._threads, method, undo=undo)
        if _ALWAYS_SAID.get(operation, "ResponseMetadata") not in reply:
            raise StorageUnavailable(f"{name}: S3's answer was cut off, or a proxy changed it")
        return reply


def _counted(tally: Tally, block: bytes) -> str:
    tally.add(block)
    return base64.b64encode(hashlib.md5(block, usedforsecurity=False).digest()).decode()


async def _joined(block: bytes, stream: AsyncGenerator[bytes]) -> bytes:
    """The block with those that follow it in the stream."""
    some = [block]
    while len(some) < _JOINED and (block := await anext(stream, b"")):
        some.append(block)
    return b"".join(some)


def _hang_up(reply: Any) -> None:
    reply["Body"].close()


def _code_of(error: StorageError) -> str | None:
    """What S3 called it; None: S3 did not answer."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - see boto3

    refusal = error.__cause__
    return refusal.response["Error"]["Code"] if isinstance(refusal, ClientError) else None


def _age_seconds(page: Any, since: datetime) -> float:
    """The age by the server's clock, which ``page``, its answer, tells: ours may be another."""
    said = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(said) if said else datetime.now(UTC)
    return max(0.0, (now - since).total_seconds())
