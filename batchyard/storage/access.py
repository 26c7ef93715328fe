"""How the places that users name for IN and OUT are reached, and what such a place can do.

A new scheme is a module like :mod:`~batchyard.storage.s3_object`, a row in
``location.SCHEMES``, and, where it needs credentials, a field of :class:`Access`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from batchyard.storage.bucket import S3Credentials
from batchyard.storage.web import WebAccess

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path


async def credentials_of_environment() -> S3Credentials:
    """Those that boto3 finds by itself."""
    return S3Credentials()


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials, which are asked for when a place needs them, and the way into the web."""

    s3: Callable[[], Awaitable[S3Credentials]] = credentials_of_environment
    web: WebAccess = field(default_factory=WebAccess)


class Location(Protocol):
    """A place that a user names. ``str()`` of it may be shown to anybody who sees the batch."""

    @property
    def filename(self) -> str:
        """What an upload of the file would be called; may be empty."""
        ...

    def read(self, access: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:
        """Stream the whole content in blocks of up to 1 MiB.

        Raises :class:`~batchyard.errors.StorageError`; a stream that ends without an error is
        complete. Whether it keeps to ``limit_bytes`` is checked by its caller as well.
        """
        ...

    async def check_output(self) -> None:
        """Find out before hours of work what can be known about writing there; creates nothing.

        Raises :class:`~batchyard.errors.StorageError`.
        """
        ...

    async def write(self, path: Path, access: Access) -> None:
        """Copy the local file ``path`` there; what was there stays until the copy is whole."""
        ...
