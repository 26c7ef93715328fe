"""What a user may write for many files: a bucket's prefix, or a folder of this machine.

::

    async for file in parse_folder("s3://data/incoming/").files(access): ...
    await parse_folder("s3://data/results/").place("monday.results.jsonl")
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from batchyard.errors import LocationRefused, ObjectNotFound
from batchyard.locations.bucket_object import BucketObject, connected_bucket
from batchyard.locations.local_file import LocalFile
from batchyard.processes.threads import in_thread
from batchyard.storage.buckets import bucket_address
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.locations.access import Access, Location

_QUIET_SECONDS: Final = 30.0
"""A local file that was not written for so long is whole, as far as one can see."""
_EMPTY_SECONDS: Final = 60.0
"""Some clients create an empty object and replace it by the whole one."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a folder. ``name``: its path in the folder, with slashes."""

    name: str
    location: Location
    size_bytes: int
    version: str
    """A text that changes with the content."""
    is_whole: bool
    """Whether its writer has probably finished it."""


class Folder(Protocol):
    """A place with many files. ``str()`` of it may be shown to anybody who sees them."""

    def files(self, access: Access) -> AsyncGenerator[FoundFile]:
        """All files in it and below, ordered by folder; raises StorageError."""
        ...

    def contains(self, other: Folder) -> bool:
        """Whether the files of ``other`` are files of this one."""
        ...

    async def place(self, name: str) -> Location:
        """Where the file of this name is written; ``name`` is like that of a FoundFile."""
        ...


@dataclass(frozen=True, slots=True)
class BucketPrefix:
    """The objects below a prefix, which ends with a slash or is empty: the whole bucket."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    async def files(self, access: Access) -> AsyncGenerator[FoundFile]:
        """Its objects. One whose upload has not ended does not exist."""
        async with (
            connected_bucket(self.scheme, self.bucket, access) as connected,
            contextlib.aclosing(connected.listing(self.prefix)) as listing,
        ):
            async for each in listing:
                yield FoundFile(
                    each.key.removeprefix(self.prefix),
                    BucketObject(self.scheme, self.bucket, each.key),
                    each.size_bytes,
                    each.etag,
                    is_whole=each.size_bytes > 0 or each.age_seconds >= _EMPTY_SECONDS,
                )

    def contains(self, other: Folder) -> bool:
        """Whether ``other`` is a part of the same bucket below the prefix, or the prefix."""
        return (
            isinstance(other, BucketPrefix)
            and (other.scheme, other.bucket) == (self.scheme, self.bucket)
            and other.prefix.startswith(self.prefix)
        )

    async def place(self, name: str) -> Location:
        """The object of this name below the prefix."""
        return BucketObject(self.scheme, self.bucket, self.prefix + name)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder of this machine, with the folders in it. Names that begin with a dot are hidden."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    async def files(self, _: Access) -> AsyncGenerator[FoundFile]:
        """Its files. Whether one is whole, only the time of its last write can tell."""
        with os_errors_as_ours(str(self)):
            found = await in_thread(_files_below, self.path)
        for each in found:
            yield each

    def contains(self, other: Folder) -> bool:
        """Whether ``other`` is the same folder or in it, whichever links lead there."""
        return isinstance(other, LocalFolder) and other.path.resolve().is_relative_to(
            self.path.resolve()
        )

    async def place(self, name: str) -> Location:
        """The file of this name; its folder is made in this one.

        Raises :class:`~batchyard.errors.ObjectNotFound` where this one does not exist.
        """
        path = self.path / name
        with os_errors_as_ours(str(path)):
            if not await in_thread(self.path.is_dir):
                raise ObjectNotFound(f"the folder {self} does not exist: create it first")
            await in_thread(path.parent.mkdir, parents=True, exist_ok=True)
        return LocalFile(path)


def parse_folder(text: str) -> BucketPrefix | LocalFolder:
    """Say which folder ``text`` names, without checking whether it exists.

    Raises :class:`~batchyard.errors.LocationRefused`.
    """
    if "://" not in text and text and "\0" not in text:
        return LocalFolder(Path(text))
    # Not `hf://`: a folder is looked at every few minutes, and each result would be a commit.
    if (address := bucket_address(text)) is None:
        raise LocationRefused(
            "give an absolute path of a folder, or s3://bucket/prefix/ (or az://, gs://)"
        )
    scheme, bucket, prefix = address
    # Not those of `incoming-old/` for `incoming`.
    return BucketPrefix(scheme, bucket, f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else "")


def _files_below(folder: Path) -> list[FoundFile]:
    if not folder.is_dir():
        raise ObjectNotFound(f"the folder {folder} does not exist")
    found = []
    for where, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if name.startswith(".") or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):
                found.append(_found(folder, path))
    return found


def _found(folder: Path, path: Path) -> FoundFile:
    status = path.stat()
    return FoundFile(
        path.relative_to(folder).as_posix(),
        LocalFile(path),
        status.st_size,
        str(status.st_mtime_ns),
        is_whole=time.time() - status.st_mtime >= _QUIET_SECONDS,
    )


def _raise(error: OSError) -> None:
    raise error
