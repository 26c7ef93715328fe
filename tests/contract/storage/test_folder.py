"""A folder that a user names: what is found there, and where results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import LocationRefused, ObjectNotFound
from batchyard.locations.access import Access
from batchyard.locations.folder import BucketPrefix, FoundFile, LocalFolder, parse_folder
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials


@pytest.fixture
def access(s3: S3Credentials) -> Access:
    async def credentials(_: Any, /) -> Any:
        return s3

    return Access(credentials)


@pytest.fixture
def folder(prefix: str) -> BucketPrefix:
    return BucketPrefix("s3", BUCKET, f"{prefix}/in/")


async def found(folder: Any, access: Access) -> dict[str, FoundFile]:
    return {file.name: file async for file in folder.files(access)}


async def test_the_objects_below_a_prefix_are_found_with_what_names_their_content(
    folder: BucketPrefix, access: Access, s3_client: Any
) -> None:
    for name in ("a.jsonl", "b/c d+ä.jsonl"):
        s3_client.put_object(Bucket=BUCKET, Key=folder.prefix + name, Body=name.encode())
    s3_client.put_object(Bucket=BUCKET, Key=f"{folder.prefix[:-1]}-old/x.jsonl", Body=b"x")
    before = await found(folder, access)
    assert sorted(before) == ["a.jsonl", "b/c d+ä.jsonl"]
    named = before["b/c d+ä.jsonl"]
    assert (str(named.location), named.is_whole) == (f"{folder}b/c d+ä.jsonl", True)
    s3_client.put_object(Bucket=BUCKET, Key=f"{folder.prefix}a.jsonl", Body=b"A.jsonl")
    after = await found(folder, access)
    assert after["a.jsonl"].version != before["a.jsonl"].version
    assert after["b/c d+ä.jsonl"] == named


async def test_an_object_that_is_still_uploaded_or_empty_is_not_whole(
    folder: BucketPrefix, access: Access, s3_client: Any
) -> None:
    names = {"Bucket": BUCKET, "Key": f"{folder.prefix}a.jsonl"}
    upload = s3_client.create_multipart_upload(**names)["UploadId"]
    part = s3_client.upload_part(**names, UploadId=upload, PartNumber=1, Body=b"line\n")
    assert await found(folder, access) == {}
    parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
    s3_client.complete_multipart_upload(**names, UploadId=upload, MultipartUpload=parts)
    s3_client.put_object(Bucket=BUCKET, Key=f"{folder.prefix}b.jsonl", Body=b"")
    whole = {name: file.is_whole for name, file in (await found(folder, access)).items()}
    assert whole == {"a.jsonl": True, "b.jsonl": False}


async def test_a_bucket_that_is_missing_is_said(access: Access) -> None:
    with pytest.raises(ObjectNotFound, match="bucket does not exist"):
        await found(BucketPrefix("s3", "no-such-bucket", ""), access)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://b", "s3://b/"),
        ("s3://b/", "s3://b/"),
        ("s3://b/in", "s3://b/in/"),
        ("s3://b/in/", "s3://b/in/"),
        ("S3://b/in", "s3://b/in/"),
        ("/data/in/", "/data/in"),
    ],
)
def test_a_folder_is_written_with_or_without_the_slash_at_its_end(text: str, shown: str) -> None:
    assert str(parse_folder(text)) == shown


@pytest.mark.parametrize("text", ["", "s3://", "s3:///in/", "https://example.com/in/", "a\0b"])
def test_what_is_no_folder_is_refused(text: str) -> None:
    with pytest.raises(LocationRefused):
        parse_folder(text)


@pytest.mark.parametrize(
    ("outer", "inner", "is_inside"),
    [
        ("s3://b/in/", "s3://b/in/out", True),
        ("s3://b/in", "s3://b/in", True),
        ("s3://b/", "s3://b/out/", True),
        ("s3://b/in/", "s3://b/input/", False),
        ("s3://b/in/", "s3://c/in/", False),
        ("/data", "/data/out", True),
        ("/data/in", "/data/in/../out", False),
        ("/data", "s3://data/out", False),
    ],
)
def test_a_folder_contains_what_is_below_it(outer: str, inner: str, is_inside: bool) -> None:
    assert parse_folder(outer).contains(parse_folder(inner)) is is_inside


async def test_results_go_below_a_folder_that_exists(tmp_path: Path) -> None:
    assert str(await BucketPrefix("s3", "b", "out/").place("x/y.jsonl")) == "s3://b/out/x/y.jsonl"
    place = await LocalFolder(tmp_path).place("x/y.jsonl")
    assert str(place) == f"{tmp_path}/x/y.jsonl"
    await place.check_output()
    with pytest.raises(ObjectNotFound, match="create it first"):
        await LocalFolder(tmp_path / "typo").place("y.jsonl")
