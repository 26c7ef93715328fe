"""Objects in an S3 bucket, under a prefix of their own."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from batchyard.errors import ObjectNotFound, StorageUnavailable
from batchyard.storage.base import ListedObject, StoredObject
from batchyard.storage.bucket import S3Bucket
from batchyard.storage.file import make_folder, os_errors_as_ours, write_file
from batchyard.storage.key import checked_key
from batchyard.storage.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials


class S3Storage:
    """A :class:`~batchyard.storage.base.Storage` in ``bucket``, of which it takes charge.

    Works with every server that speaks S3. Other programs' objects may live beside ``prefix``.
    """

    def __init__(
        self, bucket: str | S3Bucket, prefix: str = "", credentials: S3Credentials | None = None
    ) -> None:
        """``bucket`` is a name, or a bucket set up with part size and back-off of its own."""
        self._bucket = bucket if isinstance(bucket, S3Bucket) else S3Bucket(bucket, credentials)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._downloads: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        written = await self._bucket.write(self._name(key), parts)
        return StoredObject(key, written.size_bytes, written.sha256)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        return self._bucket.read(self._name(key), start=start, stop=stop)

    async def size(self, key: str) -> int:
        return await self._bucket.size(self._name(key))

    async def delete(self, key: str) -> None:
        await self._bucket.delete(self._name(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        async with contextlib.aclosing(self._bucket.list(self._prefix + prefix)) as names:
            async for name in names:
                yield name.removeprefix(self._prefix)

    async def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        async for page in self._pages("list_objects_v2", self._prefix + prefix):
            for entry in page.get("Contents", ()):
                key = str(entry["Key"]).removeprefix(self._prefix)
                yield ListedObject(key, entry["Size"], _age_seconds(page, entry["LastModified"]))

    async def remove_unfinished(self, prefix: str, older_than_seconds: float) -> int:
        removed = 0
        async for page in self._pages("list_multipart_uploads", self._prefix + prefix):
            for upload in page.get("Uploads", ()):
                if _age_seconds(page, upload["Initiated"]) < older_than_seconds:
                    continue
                # It may have ended meanwhile, which looks like S3 having lost it. Tried once: if S3
                # really is away, the next call will find the upload again.
                with contextlib.suppress(ObjectNotFound, StorageUnavailable):
                    await self._bucket._call_once(  # noqa: SLF001 — as `_call`
                        "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    removed += 1
        return removed

    async def local_path(self, key: str, spool: Path) -> Path:
        path = spool / checked_key(key)
        # Two tasks that want the same object download it once.
        lock = self._downloads.setdefault(path, asyncio.Lock())
        async with lock:
            if not path.is_file():
                with os_errors_as_ours(key):
                    await in_thread(make_folder, path.parent)
                async with contextlib.aclosing(self._bucket.read(self._name(key))) as parts:
                    await write_file(path, parts, name=key)
        return path

    async def close(self) -> None:
        await self._bucket.close()

    async def _pages(self, operation: str, prefix: str) -> AsyncIterator[Any]:
        more: dict[str, Any] = {}
        while True:
            page = await self._call(operation, Prefix=prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            if operation == "list_objects_v2":
                more = {"ContinuationToken": page["NextContinuationToken"]}
            else:
                more = {
                    "KeyMarker": page["NextKeyMarker"],
                    "UploadIdMarker": page["NextUploadIdMarker"],
                }

    async def _call(self, operation: str, **asked: Any) -> Any:
        return await self._bucket._call(operation, **asked)  # noqa: SLF001 — listings with times

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)


def _age_seconds(page: Any, since: datetime) -> float:
    """By the server's clock, which ``page``, its answer, tells: ours may be another."""
    said = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(said) if said else datetime.now(UTC)
    return max(0.0, (now - since).total_seconds())
