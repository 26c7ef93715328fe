"""``s3://bucket/key``, ``az://container/key`` or ``gs://bucket/key``, as a user's IN or OUT."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Self

from batchyard.errors import LocationRefused
from batchyard.processes.threads import in_thread
from batchyard.storage.buckets import BUCKETS, bucket_address
from batchyard.storage.file import read_file

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from batchyard.locations.access import Access
    from batchyard.storage.buckets import Bucket, ReadBucket


@dataclass(frozen=True, slots=True)
class BucketObject:
    """A :class:`~batchyard.locations.access.Location`: an object, with our credentials."""

    scheme: str
    bucket: str
    key: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The object that ``s3://bucket/key`` names; raises LocationRefused for anything else."""
        scheme, bucket, key = bucket_address(text) or (text.partition("://")[0].lower(), "", "")
        if not bucket or not key:
            raise LocationRefused(f"{text} names no object: write {scheme}://bucket/key")
        return cls(scheme, bucket, key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def text(self) -> str:
        return str(self)

    @property
    def filename(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def expires_at(self) -> int | None:
        return None

    async def read(self, access: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:  # noqa: ARG002 - the caller's check is enough
        async with (
            self.connected(access) as connected,
            contextlib.aclosing(connected.read(self.key)) as stream,
        ):
            async for block in stream:
                yield block

    async def keys(self, access: Access, prefix: str) -> AsyncGenerator[str]:
        """The keys of this bucket that begin with ``prefix``, in byte order."""
        async with (
            self.connected(access) as connected,
            contextlib.aclosing(connected.list(prefix)) as found,
        ):
            async for key in found:
                yield key

    @property
    def is_folder(self) -> bool:
        """Whether it names what is below a prefix."""
        return not self.key or self.key.endswith("/")

    async def pinned(self, _: Access) -> Self:
        """The same place: an object that is replaced while it is read is noticed by its ETag."""
        return self

    async def check_output(self) -> None:
        """Raises LocationRefused for what names a folder; only a write tells the rest."""
        if self.is_folder:
            raise LocationRefused(f"{self} is a folder: give a file, such as {self}results.jsonl")

    async def probe(self, _: Access) -> None:
        """Do nothing: only writing shows whether it is allowed."""

    async def write(self, path: Path, access: Access) -> None:
        async with (
            connected_bucket(self.scheme, self.bucket, access) as connected,
            contextlib.aclosing(read_file(path)) as parts,
        ):
            await connected.write(self.key, parts)

    def connected(self, access: Access) -> AbstractAsyncContextManager[ReadBucket]:
        """Its bucket, as long as the block runs."""
        return connected_bucket(self.scheme, self.bucket, access)


@contextlib.asynccontextmanager
async def connected_bucket(scheme: str, name: str, access: Access) -> AsyncIterator[Bucket]:
    """The user's bucket of this name, as long as the block runs."""
    kind = BUCKETS[scheme]
    credentials = replace(await access.credentials(kind.credentials), ca_file=access.ca_file)
    connected = await in_thread(kind.open, name, credentials, None)
    try:
        yield connected
    finally:
        await connected.close()
