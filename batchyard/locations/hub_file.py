"""``hf://datasets/OWNER/NAME[@REVISION]/PATH``, a file of a hub's dataset, as IN or OUT."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from batchyard.errors import AccessDenied, LocationRefused
from batchyard.locations.bucket_object import BucketObject
from batchyard.processes.threads import in_thread
from batchyard.storage.hub_repository import HubCredentials, HubRepository, hub_address, is_commit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.locations.access import Access

SCHEME = "hf"


@dataclass(frozen=True, slots=True)
class HubFile(BucketObject):
    """A :class:`~batchyard.locations.access.Location`; the bucket is the dataset and its revision.

    Without a path it is the whole dataset, as for other programs.
    """

    @classmethod
    def parse(cls, text: str) -> Self:
        """The file that the text names; raises LocationRefused for anything else."""
        return cls(SCHEME, *hub_address(text))

    async def pinned(self, access: Access) -> Self:
        """The same place in the commit that the branch has now."""
        async with self.connected(access) as repository:
            return replace(self, bucket=await repository.pinned())

    async def check_output(self) -> None:
        """Raises LocationRefused for a folder, and for a commit: only a branch can be written."""
        await BucketObject.check_output(self)
        if is_commit(self.bucket):
            raise LocationRefused(f"{self} is in a commit, which never changes: name a branch")

    async def probe(self, access: Access) -> None:
        try:
            async with self.connected(access) as repository:
                await repository.probe()
        except LocationRefused as error:
            # Such as a missing library: a write would be refused as well.
            raise AccessDenied(str(error)) from None

    async def write(self, path: Path, access: Access) -> None:
        async with self.connected(access) as repository:
            await repository.write_file(self.key, path)

    @contextlib.asynccontextmanager
    async def connected(self, access: Access) -> AsyncIterator[HubRepository]:
        """The dataset, as long as the block runs."""
        credentials = replace(await access.credentials(HubCredentials), ca_file=access.ca_file)
        repository = await in_thread(HubRepository, self.bucket, credentials)
        try:
            yield repository
        finally:
            await repository.close()
