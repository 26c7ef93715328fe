"""The kinds of buckets by their schemes, and what each of them can do.

A new one is a row of :data:`BUCKETS`; a block for its credentials is in ``blocks``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.cloud_bucket import (
    AzureCredentials,
    GoogleCredentials,
    azure_container,
    google_bucket,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable

    from batchyard.storage.backoff import Backoff
    from batchyard.storage.base import ListedObject, StoredObject


class ReadBucket(Protocol):
    """Objects under raw keys, as users' inputs need them."""

    def read(self, key: str) -> AsyncGenerator[bytes]:
        """Stream one version of the object."""
        ...

    def list(self, prefix: str) -> AsyncGenerator[str]:
        """Every key that starts with ``prefix``, in byte order."""
        ...


class Bucket(ReadBucket, Protocol):
    """The same as the object store needs them. Errors are those of :mod:`batchyard.errors`."""

    async def write(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject: ...

    def read(self, key: str, *, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Stream a range of one version of the object."""
        ...

    async def size(self, key: str) -> int: ...

    async def delete(self, key: str) -> None: ...

    def listing(self, prefix: str) -> AsyncGenerator[ListedObject]: ...

    async def abort_uploads(self, prefix: str, older_than_seconds: float) -> int:
        """Give up uploads below ``prefix`` that were begun so long ago: how many."""
        ...

    async def close(self) -> None: ...


class BucketKind(NamedTuple):
    """The class of the credentials, and what makes the bucket, which may block."""

    credentials: type[Any]
    open: Callable[[str, Any, Backoff | None], Bucket]


BUCKETS: Final = {
    "s3": BucketKind(
        S3Credentials, lambda name, given, backoff: S3Bucket(name, given, backoff=backoff)
    ),
    "az": BucketKind(AzureCredentials, azure_container),
    "gs": BucketKind(GoogleCredentials, google_bucket),
}
_ADDRESS: Final = re.compile(
    rf"({'|'.join(BUCKETS)})://([^/]+)(?:/(.*))?", re.IGNORECASE | re.DOTALL
)


def bucket_address(text: str) -> tuple[str, str, str] | None:
    """Scheme, bucket and what is behind it, such as ``("s3", "data", "in/a.jsonl")``."""
    found = _ADDRESS.fullmatch(text)
    return None if found is None else (found[1].lower(), found[2], found[3] or "")
