"""The object store, as the rest of the product sees it: one Protocol. No implementation here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a completed write left behind. ``sha256`` is lower-case hex of the whole content."""

    key: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing. ``age_seconds``: since it was written, by the storage's clock.

    ``etag`` is another one for other content, and empty where the backend has none.
    """

    key: str
    size_bytes: int
    age_seconds: float
    etag: str = ""


class Storage(Protocol):
    """Immutable objects under slash-separated keys such as ``files/file-abc``.

    An object appears whole or not at all: a ``put`` that fails or is cancelled leaves what was
    there before. Errors are those of :mod:`batchyard.errors`, whatever the backend raised.
    """

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Store the concatenated parts; on return the bytes are durable.

        Raises :class:`~batchyard.errors.StorageFull` or
        :class:`~batchyard.errors.StorageUnavailable`.
        """
        ...

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Stream bytes ``start`` (inclusive) to ``stop`` (exclusive; ``None``: the end).

        Who stops before the end closes the stream. Raises
        :class:`~batchyard.errors.ObjectNotFound` on the first step.
        """
        ...

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; one that is absent is already as the caller wants it."""
        ...

    def list(self, prefix: str) -> AsyncIterator[str]:
        """Every key that starts with ``prefix``, in byte order."""
        ...

    def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        """List what :meth:`list` does, with sizes and ages; one that goes away meanwhile may be
        left out."""
        ...

    async def remove_unfinished(self, prefix: str, older_than_seconds: float) -> int:
        """Wipe what killed writers left half-written below ``prefix``, a folder: how many.

        What was touched less than ``older_than_seconds`` ago may still be growing, and stays.
        """
        ...

    async def local_path(self, key: str, spool: Path) -> Path:
        """A local file with the object's content, for random reading; never write to it.

        A backend without local files downloads into ``spool`` once; the caller owns that folder.
        """
        ...

    async def close(self) -> None:
        """Release connections. The storage is not used afterwards."""
        ...
