"""How the places that users name for IN and OUT are reached, and what such a place can do.

A new scheme is a module like :mod:`~batchyard.locations.bucket_object` and a row in
``location.SCHEMES``. Where it needs credentials, these are a class of their own, and operators
give them with a block in ``blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from batchyard.locations.web import WebAccess

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

C = TypeVar("C")


class FindCredentials(Protocol):
    """Finds the credentials of one scheme by their class, for example ``S3Credentials``."""

    async def __call__(self, kind: type[C], /) -> C: ...


async def credentials_of_environment(kind: type[C], /) -> C:
    """Empty ones: the scheme's library looks for its own."""
    return kind()


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials, which are asked for when a place needs them, and the way into the web."""

    credentials: FindCredentials = credentials_of_environment
    web: WebAccess = field(default_factory=WebAccess)
    ca_file: Path | None = None
    """Certificate authorities that a scheme's library is to trust, in place of its own."""


class Location(Protocol):
    """A place that a user names. ``str()`` of it may be shown to anybody who sees the batch.

    Two that are equal are the same place.
    """

    @property
    def text(self) -> str:
        """What ``parse_location`` makes an equal one of: to be stored sealed, never shown."""
        ...

    @property
    def filename(self) -> str:
        """What an upload of the file would be called; may be empty."""
        ...

    @property
    def expires_at(self) -> int | None:
        """Until when it can be used, in Unix seconds; None if it does not say."""
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

    async def probe(self, access: Access) -> None:
        """Ask its server what it says to a write, as far as that can be asked without one.

        Raises :class:`~batchyard.errors.AccessDenied` and
        :class:`~batchyard.errors.ObjectNotFound` where a write would be refused now and later,
        and :class:`~batchyard.errors.StorageError` where nothing is known.
        """
        ...

    async def write(self, path: Path, access: Access) -> None:
        """Copy the local file ``path`` there; what was there stays until the copy is whole."""
        ...
