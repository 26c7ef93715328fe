"""``s3://bucket/key`` as IN and OUT."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import ObjectNotFound, ObjectTooLarge
from batchyard.locations.access import Access
from batchyard.locations.location import parse_location, read_location, write_location
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials


def access_with(credentials: S3Credentials) -> Access:
    async def find(_: Any) -> Any:
        return credentials

    return Access(find)


CONTENT = random.Random(4).randbytes(9 * 1024 * 1024)  # more than one part


async def test_an_object_is_written_and_read_back(
    s3: S3Credentials, prefix: str, tmp_path: Path
) -> None:
    """The key may hold whatever S3 allows; the limit holds for S3 as well."""
    path = tmp_path / "results"
    path.write_bytes(CONTENT)
    location = parse_location(f"s3://{BUCKET}/{prefix}/my results/../ü.jsonl")

    await write_location(location, path, access_with(s3))

    read = [
        block
        async for block in read_location(location, limit_bytes=len(CONTENT), access=access_with(s3))
    ]
    assert b"".join(read) == CONTENT
    with pytest.raises(ObjectTooLarge):
        async for _ in read_location(
            location, limit_bytes=len(CONTENT) - 1, access=access_with(s3)
        ):
            pass


async def test_an_absent_object_is_not_found(s3: S3Credentials, prefix: str) -> None:
    """The message holds the location as the user wrote it."""
    location = parse_location(f"s3://{BUCKET}/{prefix}/in.jsonl")

    with pytest.raises(ObjectNotFound, match=f"s3://{BUCKET}/{prefix}/in.jsonl does not exist"):
        await anext(read_location(location, limit_bytes=1, access=access_with(s3)))
