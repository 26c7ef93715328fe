"""A path on this machine, as a user's IN or OUT."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.errors import AccessDenied, LocationRefused, ObjectNotFound
from batchyard.processes.threads import in_thread
from batchyard.storage.file import os_errors_as_ours, read_file, write_file

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from batchyard.locations.access import Access


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A :class:`~batchyard.locations.access.Location`: a path on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def text(self) -> str:
        return str(self)

    def absolute(self) -> LocalFile:
        """The same file for a process in another folder."""
        return LocalFile(self.path.absolute())

    @property
    def filename(self) -> str:
        return self.path.name

    @property
    def expires_at(self) -> int | None:
        return None

    async def read(self, _: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:  # noqa: ARG002 - the caller's check is enough
        path = self.path
        await in_thread(check_source, path)
        async with contextlib.aclosing(read_file(path)) as stream:
            async for block in stream:
                yield block

    async def check_output(self) -> None:
        """Raises for a missing folder, for what is no file, and where nothing may be written."""
        await in_thread(_check_target, self.path)

    async def probe(self, _: Access) -> None:
        """Do nothing: the path may be on another machine."""

    async def write(self, path: Path, _: Access) -> None:
        async with contextlib.aclosing(read_file(path)) as parts:
            # Through a symbolic link, not in place of it.
            await write_file(self.path.resolve(), parts, name=str(self))


def check_source(path: Path) -> None:
    """Raises :class:`~batchyard.errors.LocationRefused` for what is there and is no file."""
    with os_errors_as_ours(str(path)):
        if path.is_dir():
            raise LocationRefused(f"{path} is a directory: give a file")
        if path.exists() and not path.is_file():
            raise LocationRefused(f"{path} is a pipe or a device: save it to a file first")


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
