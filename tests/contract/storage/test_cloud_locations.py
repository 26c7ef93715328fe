"""``az://`` and ``gs://`` as IN, OUT and folders, and what is wrong with them in words."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    StorageUnavailable,
)
from batchyard.locations.access import Access
from batchyard.locations.folder import parse_folder
from batchyard.locations.location import parse_location, read_location, write_location
from batchyard.settings_sources import is_in_bucket
from batchyard.storage.buckets import BUCKETS
from batchyard.storage.cloud_bucket import CloudBucket
from tests.contract.storage.conftest import PART_BYTES, QUICK
from tests.services.azure import CONTAINER
from tests.services.google import google_for_session
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.locations.access import Location
    from batchyard.storage.bucket import S3Credentials

CONTENT = random.Random(4).randbytes(9 * 1024 * 1024)  # more than one range


class Cloud(NamedTuple):
    """A test's own part of a bucket. ``url`` ends with a slash."""

    url: str
    credentials: Any

    @property
    def access(self) -> Access:
        async def find(_: Any) -> Any:
            return self.credentials

        return Access(find)

    def bucket(self, name: str = CONTAINER, **changes: Any) -> CloudBucket:
        scheme: Any = self.url.partition(":")[0]
        return CloudBucket(scheme, name, replace(self.credentials, **changes), backoff=QUICK)

    async def read(self, place: Location) -> bytes:
        stream = read_location(place, limit_bytes=2**30, access=self.access)
        return b"".join([block async for block in stream])


@pytest.fixture(params=["az", "gs"])
def cloud(request: pytest.FixtureRequest, prefix: str) -> Cloud:
    kind = {"az": "azure", "gs": "google"}[request.param]
    return Cloud(f"{request.param}://{CONTAINER}/{prefix}/", request.getfixturevalue(kind))


async def some(content: bytes = b"x") -> AsyncIterator[bytes]:
    yield content


@pytest.mark.parametrize("name", ["results.jsonl", "my results/ü%20#?.jsonl"])
async def test_an_object_is_written_and_read_back(cloud: Cloud, name: str, tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_bytes(CONTENT)
    place = parse_location(cloud.url + name)
    await write_location(place, path, cloud.access)
    assert await cloud.read(place) == CONTENT


async def test_an_absent_object_is_not_found(cloud: Cloud) -> None:
    place = parse_location(f"{cloud.url}in.jsonl")
    with pytest.raises(ObjectNotFound, match=f"{cloud.url}in.jsonl does not exist"):
        await cloud.read(place)


async def test_a_bucket_that_does_not_exist_is_named(cloud: Cloud) -> None:
    bucket = cloud.bucket("no-such-bucket")
    with pytest.raises(ObjectNotFound, match="the bucket does not exist, create it first"):
        await bucket.write("a", some())
    with pytest.raises(ObjectNotFound, match="the bucket does not exist, create it first"):
        await bucket.write("a", some(bytes(20 * 1024**2)))
    with pytest.raises(ObjectNotFound, match="the bucket does not exist, create it first"):
        _ = [key async for key in bucket.list("")]


async def test_a_key_of_azure_that_is_not_the_accounts_is_refused(azure: Any) -> None:
    place = Cloud(f"az://{CONTAINER}/", replace(azure, account_key="AAAA"))
    with pytest.raises(AccessDenied, match="not allowed to use az://batches/a") as raised:
        await place.bucket().write("a", some())
    with pytest.raises(AccessDenied, match="not allowed to use az://batches/a"):
        await place.bucket().write("a", some(bytes(20 * 1024**2)))
    assert "AAAA" not in str(raised.value)


async def test_a_server_that_is_away_is_asked_again(cloud: Cloud) -> None:
    away: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9"}
    if cloud.url.startswith("gs"):
        account = '{"gcs_base_url": "http://127.0.0.1:9", "disable_oauth": true, '
        away["service_account_key"] = (
            account + '"client_email": "", "private_key": "", ' + ('"private_key_id": ""}')
        )
    with pytest.raises(StorageUnavailable, match="the store failed"):
        await cloud.bucket(**away).size("a")


@pytest.mark.parametrize("key", ["/a", "a/", "a//b", "a/../b"])
async def test_a_key_that_would_mean_another_one_is_refused(cloud: Cloud, key: str) -> None:
    bucket = cloud.bucket()
    with pytest.raises(LocationRefused):
        await bucket.write(key, some())
    with pytest.raises(LocationRefused):
        await anext(bucket.read(key))


async def test_an_object_that_is_replaced_while_it_is_read_has_changed(
    cloud: Cloud, prefix: str
) -> None:
    bucket = cloud.bucket()
    await bucket.write(f"{prefix}/a", some(CONTENT))
    stream = bucket.read(f"{prefix}/a")
    await anext(stream)
    await bucket.write(f"{prefix}/a", some(CONTENT[::-1]))
    with pytest.raises(ObjectChanged):
        _ = [block async for block in stream]


async def test_an_object_that_is_removed_while_it_is_read_has_changed(
    cloud: Cloud, prefix: str
) -> None:
    bucket = cloud.bucket()
    await bucket.write(f"{prefix}/a", some(CONTENT))
    stream = bucket.read(f"{prefix}/a")
    await anext(stream)
    await bucket.delete(f"{prefix}/a")
    with pytest.raises(ObjectChanged):
        _ = [block async for block in stream]


async def test_the_files_of_a_prefix_are_found(cloud: Cloud, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"{}\n")
    for name in ("in/a.jsonl", "in/deep/b.jsonl", "in2/c.jsonl"):
        await write_location(parse_location(cloud.url + name), path, cloud.access)
    folder = parse_folder(f"{cloud.url}in")
    found = [file async for file in folder.files(cloud.access)]
    assert [(file.name, file.size_bytes, file.is_whole) for file in found] == [
        *(("a.jsonl", 3, True), ("deep/b.jsonl", 3, True))
    ]
    assert await cloud.read(found[0].location) == b"{}\n"
    assert found[0].location == parse_location(f"{cloud.url}in/a.jsonl")
    assert found[0].version
    assert not folder.contains(parse_folder(f"s3://{CONTAINER}/{cloud.url}in"))


@pytest.mark.parametrize(
    ("size", "refused"),
    [
        (5, ["PUT", "HEAD", "GET"]),
        (11, ["POST", "PUT", "partNumber=2", "uploadId", "GET", "GET"]),
    ],
    ids=["whole", "in parts"],
)
async def test_a_request_that_is_refused_for_now_is_sent_again(
    s3: S3Credentials, prefix: str, size: int, refused: list[str]
) -> None:
    """Each once, whichever it is."""
    content = random.Random(size).randbytes(size * 1024 * 1024 - 1)
    left = list(refused)

    def refuses(request: str) -> bool:
        for word in left:
            if word in request:
                left.remove(word)
                return True
        return False

    with google_for_session(s3, refuses) as credentials:
        bucket = CloudBucket("gs", BUCKET, credentials, part_bytes=PART_BYTES, backoff=QUICK)
        await bucket.write(f"{prefix}/a", some(content))
        assert b"".join([block async for block in bucket.read(f"{prefix}/a")]) == content
    assert left == []


async def test_a_listing_that_is_refused_for_now_is_asked_for_again(
    s3: S3Credentials, prefix: str
) -> None:
    """Else one answer of 503 would end a batch whose dataset is a folder."""
    left = ["prefix="]

    def refuses(request: str) -> bool:
        return any(word in request for word in left) and bool(left.pop())

    with google_for_session(s3, refuses) as credentials:
        bucket = CloudBucket("gs", BUCKET, credentials, backoff=QUICK)
        await bucket.write(f"{prefix}/a", some())
        assert [key async for key in bucket.list(f"{prefix}/")] == [f"{prefix}/a"]
    assert left == []


async def test_a_service_that_refuses_for_long_is_unavailable(
    s3: S3Credentials, prefix: str
) -> None:
    with google_for_session(s3, lambda request: "partNumber" in request) as credentials:
        bucket = CloudBucket("gs", BUCKET, credentials, part_bytes=PART_BYTES, backoff=QUICK)
        with pytest.raises(StorageUnavailable, match="the store answered 503"):
            await bucket.write(f"{prefix}/a", some(CONTENT))
        with pytest.raises(ObjectNotFound):
            await bucket.size(f"{prefix}/a")


def test_every_kind_of_bucket_may_be_the_object_store() -> None:
    """The settings lie below the stores and have a list of their own."""
    assert all(is_in_bucket(f"{scheme}://bucket/prefix") for scheme in BUCKETS)
    assert not is_in_bucket("ftp://bucket/prefix")
