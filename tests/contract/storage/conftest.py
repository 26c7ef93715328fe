"""A real S3 server for the session, and every Storage that the contract suite is run against."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.locations.web import WebAccess
from batchyard.storage.backoff import Backoff
from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.local import LocalStorage
from batchyard.storage.memory import MemoryStorage
from batchyard.storage.s3 import S3Storage
from tests.contract.storage.presigned_storage import PresignedStorage
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.storage.base import Storage

PART_BYTES = 5 * 1024 * 1024  # the least that S3 takes for a part that is not the last
QUICK = Backoff(attempts=4, first_seconds=0.005, longest_seconds=0.02)


@pytest.fixture(scope="session")
def s3_client(s3: S3Credentials) -> Any:
    """A boto3 client, for looking behind our code's back."""
    return s3.client()


@pytest.fixture
def prefix() -> str:
    """A part of the bucket for this test alone."""
    return secrets.token_hex(8)


@pytest.fixture(scope="session")
def s3_bucket(s3: S3Credentials) -> S3Bucket:
    """The bucket with small parts and short waits; boto3 takes its time to make one."""
    return S3Bucket(BUCKET, s3, part_bytes=PART_BYTES, backoff=QUICK)


@pytest.fixture
def s3_storage(s3_bucket: S3Bucket, prefix: str) -> S3Storage:
    """A Storage in this test's part of the bucket."""
    return S3Storage(s3_bucket, prefix)


@pytest.fixture(params=["local", "memory", "s3", "presigned"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Each implementation in turn, empty."""
    match request.param:
        case "local":
            return LocalStorage(tmp_path / "objects")
        case "memory":
            return MemoryStorage()
        case "s3":
            made: S3Storage = request.getfixturevalue("s3_storage")
            return made
    return PresignedStorage(
        request.getfixturevalue("s3_client"),
        BUCKET,
        request.getfixturevalue("prefix"),
        WebAccess(backoff=QUICK),
    )
