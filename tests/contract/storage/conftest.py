"""A real S3 server for the session, and every Storage that the contract suite is run against."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.locations.web import WebAccess
from batchyard.storage.backoff import Backoff
from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.bucket_storage import BucketStorage
from batchyard.storage.cloud_bucket import CloudBucket
from batchyard.storage.local import LocalStorage
from batchyard.storage.memory import MemoryStorage
from tests.contract.storage.presigned_storage import PresignedStorage
from tests.services.azure import CONTAINER, azurite_for_session
from tests.services.google import google_for_session
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.storage.base import Storage
    from batchyard.storage.cloud_bucket import AzureCredentials, GoogleCredentials

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
def s3_storage(s3_bucket: S3Bucket, prefix: str) -> BucketStorage:
    """A Storage in this test's part of the bucket."""
    return BucketStorage(s3_bucket, prefix)


@pytest.fixture(scope="session")
def azure() -> Iterator[AzureCredentials]:
    """Azurite."""
    with azurite_for_session() as credentials:
        yield credentials


@pytest.fixture(scope="session")
def google(s3: S3Credentials) -> Iterator[GoogleCredentials]:
    """Google's API in front of the S3 server."""
    with google_for_session(s3) as credentials:
        yield credentials


@pytest.fixture
def azure_storage(azure: AzureCredentials, prefix: str) -> BucketStorage:
    """A Storage in this test's part of the container."""
    bucket = CloudBucket("az", CONTAINER, azure, part_bytes=PART_BYTES, backoff=QUICK)
    return BucketStorage(bucket, prefix)


@pytest.fixture
def google_storage(google: GoogleCredentials, prefix: str) -> BucketStorage:
    """A Storage in this test's part of the bucket."""
    bucket = CloudBucket("gs", BUCKET, google, part_bytes=PART_BYTES, backoff=QUICK)
    return BucketStorage(bucket, prefix)


@pytest.fixture(params=["local", "memory", "s3", "azure", "google", "presigned"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Each implementation in turn, empty."""
    match request.param:
        case "local":
            return LocalStorage(tmp_path / "objects")
        case "memory":
            return MemoryStorage()
        case "s3" | "azure" | "google":
            made: BucketStorage = request.getfixturevalue(f"{request.param}_storage")
            return made
    return PresignedStorage(
        request.getfixturevalue("s3_client"),
        BUCKET,
        request.getfixturevalue("prefix"),
        WebAccess(backoff=QUICK),
    )
