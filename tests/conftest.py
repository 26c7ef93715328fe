"""Services that several parts of the suite use: each is started once, when it is first wanted."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.storage.bucket import S3Credentials
from tests.services.swift import BUCKET, swift_for_session

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Credentials]:
    """A running Swift with one bucket, empty at first: each test has a part of it to itself."""
    # Not pytest's tmp_path: it is kept for three sessions, and this one is large.
    root = Path(tempfile.mkdtemp(prefix="swift-"))
    try:
        with swift_for_session(root) as server:
            credentials = S3Credentials(
                endpoint_url=server.endpoint_url,
                region=server.region,
                access_key_id=server.access_key_id,
                secret_access_key=server.secret_access_key,
            )
            credentials.client().create_bucket(Bucket=BUCKET)
            yield credentials
    finally:
        shutil.rmtree(root)
