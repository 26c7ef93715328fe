"""Presigned URLs dressed as a Storage, so that they face the same suite as the rest."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.locations.download import download
from batchyard.locations.upload import upload
from batchyard.storage.base import ListedObject
from batchyard.storage.file import make_folder, write_file
from batchyard.storage.key import checked_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

    from batchyard.locations.web import WebAccess
    from batchyard.storage.base import StoredObject

_NO_LIMIT = 1 << 40


class PresignedStorage:
    """Content goes through URLs that boto3 signed; what no URL can do, boto3 does itself."""

    def __init__(self, client: Any, bucket: str, prefix: str, web: WebAccess) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._web = web

    def url(self, method: str, key: str) -> str:
        """A URL for ``get_object`` or ``put_object``."""
        named = {"Bucket": self._bucket, "Key": f"{self._prefix}/{checked_key(key)}"}
        return str(self._client.generate_presigned_url(method, Params=named, ExpiresIn=60))

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        url = self.url("put_object", key)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "content"
            written = await write_file(path, parts, name=key)
            await upload(url, path, web=self._web)
        return written

    async def get(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        content = bytearray()
        async for block in self._whole(key):
            content += block
        if part := bytes(content[start:stop]):
            yield part

    async def size(self, key: str) -> int:
        return len(b"".join([block async for block in self._whole(key)]))

    async def delete(self, key: str) -> None:
        named = {"Bucket": self._bucket, "Key": f"{self._prefix}/{checked_key(key)}"}
        with contextlib.suppress(self._client.exceptions.NoSuchKey):
            await asyncio.to_thread(self._client.delete_object, **named)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        async for entry in self.listing(prefix):
            yield entry.key

    async def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        found = await asyncio.to_thread(
            self._client.list_objects_v2, Bucket=self._bucket, Prefix=f"{self._prefix}/{prefix}"
        )
        for entry in found.get("Contents", ()):
            age = datetime.now(UTC) - entry["LastModified"]
            key = entry["Key"].removeprefix(f"{self._prefix}/")
            yield ListedObject(key, entry["Size"], max(0.0, age.total_seconds()))

    async def remove_unfinished(self, prefix: str, older_than_seconds: float) -> int:  # noqa: ARG002 - of the Protocol
        """One PUT is all there is of an upload: nothing is ever half-written."""
        return 0

    async def local_path(self, key: str, spool: Path) -> Path:
        path = spool / checked_key(key)
        if not path.is_file():
            make_folder(path.parent)
            await write_file(path, self._whole(key))
        return path

    async def close(self) -> None:
        """The client belongs to the session."""

    def _whole(self, key: str) -> AsyncIterator[bytes]:
        return download(self.url("get_object", key), limit_bytes=_NO_LIMIT, web=self._web)
