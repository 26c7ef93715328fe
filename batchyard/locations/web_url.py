"""An http(s) URL, as a user's IN or OUT."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Self

from batchyard.errors import StorageUnavailable
from batchyard.locations.download import download
from batchyard.locations.known_stores import is_known_store
from batchyard.locations.presigned import (
    check_not_expired,
    earliest_expiry,
    other_content,
    put_headers,
    signature_of,
    wanted_signature,
)
from batchyard.locations.probe import probe_put
from batchyard.locations.upload import upload
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from batchyard.locations.access import Access


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A :class:`~batchyard.locations.access.Location`: a URL, presigned or public."""

    url: str = field(repr=False)
    """The whole URL: a secret when presigned. ``str()`` of this object leaves its query out."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The http(s) URL that the text is; raises LocationRefused for anything else."""
        checked_url(text)
        return cls(text)

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def text(self) -> str:
        return self.url

    @property
    def filename(self) -> str:
        return PurePosixPath(str(self)).name

    @property
    def expires_at(self) -> int | None:
        return earliest_expiry([self.url])

    def read(self, access: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:
        return download(self.url, limit_bytes=limit_bytes, web=access.web, may_be_packed=True)

    async def check_output(self) -> None:
        """Raises for a signature that has expired or that covers what an upload cannot send."""
        check_not_expired(self.url)
        put_headers(self.url)

    async def probe(self, access: Access) -> None:
        """A presigned one only, of a store that keeps what is there: others might replace it."""
        if signature_of(self.url) is None:
            return
        is_asked = is_known_store(self.url)
        if is_asked:
            await probe_put(self.url, web=access.web)
        if (why := other_content(self.url)) is not None:
            raise StorageUnavailable(f"{self}: {why}")
        if not is_asked:
            raise StorageUnavailable(
                f"{self} was not asked, because only the stores of AWS, Google and Azure are known "
                f"to change nothing then. Check that it is signed {wanted_signature(self.url)}"
            )

    async def write(self, path: Path, access: Access) -> None:
        await upload(self.url, path, web=access.web)
