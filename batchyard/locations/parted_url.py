"""Presigned URLs of a multipart upload, as a user's OUT: for files that no single PUT takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import quote, unquote

from batchyard.errors import LocationRefused, StorageUnavailable
from batchyard.locations.presigned import (
    check_not_expired,
    earliest_expiry,
    other_content,
    post_headers,
    put_headers,
)
from batchyard.locations.upload import upload_parts
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from batchyard.locations.access import Access

MOST_PARTS: Final = 1000
_PREFIX: Final = "multipart+"


@dataclass(frozen=True, slots=True)
class PartedUrl:
    """A :class:`~batchyard.locations.access.Location`: an upload that the user has begun.

    It has a URL to PUT each part to (S3's ``UploadPart``, in the order of the part numbers from 1
    on), and one that completes it (``CompleteMultipartUpload``). All of them are secrets.
    """

    part_urls: tuple[str, ...] = field(repr=False)
    complete_url: str = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.part_urls) <= MOST_PARTS:
            raise LocationRefused(f"give the URLs of 1 to {MOST_PARTS} parts")
        for url in self.urls:
            checked_url(url)

    @classmethod
    def parse(cls, text: str) -> Self:
        """What :attr:`text` is; raises LocationRefused for anything else."""
        complete_url, _, parts = text[len(_PREFIX) :].partition("#")
        try:
            part_urls = json.loads(unquote(parts))
        except ValueError:
            part_urls = None
        if not isinstance(part_urls, list) or not all(isinstance(url, str) for url in part_urls):
            raise LocationRefused(f"{shown(complete_url)} comes without the URLs of its parts")
        return cls(tuple(part_urls), complete_url)

    def __str__(self) -> str:
        return shown(self.complete_url)

    @property
    def text(self) -> str:
        # Its host is found where that of every URL is.
        return f"{_PREFIX}{self.complete_url}#{quote(json.dumps(self.part_urls))}"

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.part_urls, self.complete_url)

    @property
    def expires_at(self) -> int | None:
        return earliest_expiry(self.urls)

    @property
    def filename(self) -> str:
        return ""

    async def read(self, _: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:  # noqa: ARG002 - there is nothing to read
        raise LocationRefused(f"{self} takes an upload in parts, and cannot be read")
        yield b""

    async def check_output(self) -> None:
        """Raises for a signature that has expired or that covers what an upload cannot send."""
        for url in self.urls:
            check_not_expired(url)
        for url in self.part_urls:
            put_headers(url)
        post_headers(self.complete_url)

    async def probe(self, _: Access) -> None:
        """Its server is not asked: a part that was sent stays."""
        for url in self.urls:
            if (why := other_content(url)) is not None:
                raise StorageUnavailable(f"{shown(url)}: {why}")

    async def write(self, path: Path, access: Access) -> None:
        await upload_parts(self.part_urls, self.complete_url, path, web=access.web)
