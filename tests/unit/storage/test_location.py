"""What a user may write for IN and OUT, except S3, which needs its server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
)
from batchyard.locations.access import Access, Location
from batchyard.locations.bucket_object import BucketObject
from batchyard.locations.hub_file import HubFile
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location, read_location, write_location
from batchyard.locations.web_url import WebUrl
from tests.unit.storage.web_server import gives, says

if TYPE_CHECKING:
    from batchyard.locations.web import WebAccess
    from tests.unit.storage.web_server import WebServer


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def read(
    location: Location, *, limit_bytes: int = 1000, web: WebAccess | None = None
) -> bytes:
    stream = read_location(
        location, limit_bytes=limit_bytes, access=Access(web=web) if web else Access()
    )
    return b"".join([block async for block in stream])


PARQUET = "refs%2Fconvert%2Fparquet"
NO_DATASETS = (
    "me/model",
    "datasets/squad",
    "spaces/me/x",
    "buckets/me/x/a",
    "datasets/me/x@/a",
    "",
)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("in.jsonl", LocalFile(Path("in.jsonl"))),
        ("/data/my in.jsonl", LocalFile(Path("/data/my in.jsonl"))),
        ("C:in.jsonl", LocalFile(Path("C:in.jsonl"))),
        ("s3://bucket/a/b c.jsonl", BucketObject("s3", "bucket", "a/b c.jsonl")),
        ("S3://bucket/k", BucketObject("s3", "bucket", "k")),
        ("az://data/a/b.jsonl", BucketObject("az", "data", "a/b.jsonl")),
        ("gs://bucket/k", BucketObject("gs", "bucket", "k")),
        ("hf://datasets/me/a.b-c", HubFile("hf", "datasets/me/a.b-c", "")),
        ("HF://datasets/me/x@main/d/", HubFile("hf", "datasets/me/x", "d/")),
        ("hf://datasets/me/x@v1/d/a b.jsonl", HubFile("hf", "datasets/me/x@v1", "d/a b.jsonl")),
        ("hf://datasets/me/x@f%2Fy/a", HubFile("hf", "datasets/me/x@f%2Fy", "a")),
        ("hf://datasets/me/x@refs/pr/7/a", HubFile("hf", "datasets/me/x@refs%2Fpr%2F7", "a")),
        *(
            (f"hf://datasets/me/x@{at}/a/*", HubFile("hf", f"datasets/me/x@{PARQUET}", "a/*"))
            for at in ("~parquet", "refs/convert/parquet", "refs%2Fconvert%2Fparquet")
        ),
        ("https://h.example/in?sig=x", WebUrl("https://h.example/in?sig=x")),
        ("HTTP://h.example/in", WebUrl("HTTP://h.example/in")),
    ],
)
def test_a_location_is_a_path_an_object_or_a_url(text: str, location: Location) -> None:
    """The scheme decides; without one it is a path."""
    assert parse_location(text) == location
    assert parse_location(location.text) == location


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give a path"),
        ("a\0b", "give a path"),
        ("ftp://h.example/in", "ftp:// is not supported"),
        ("file:///etc/passwd", "use a plain path"),
        ("gcs://bucket/key", "not supported: use a plain path, s3://bucket/key, az://"),
        ("az://container/", "write az://bucket/key"),
        ("s3://bucket", "write s3://bucket/key"),
        ("s3://bucket/", "write s3://bucket/key"),
        ("s3:///key", "write s3://bucket/key"),
        *((f"hf://{each}", r"write hf://datasets/OWNER/NAME") for each in NO_DATASETS),
        ("hf://datasets/me/x/a/../b", "no empty part"),
        ("hf://datasets/me/x//b", "no empty part"),
        ("https://user:pw@h.example/in", "presigned URL instead"),
        ("https:///in", "names no host"),
    ],
)
def test_anything_else_is_refused_with_the_way_out(text: str, message: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(LocationRefused, match=message):
        parse_location(text)


def test_a_url_is_shown_without_its_signature() -> None:
    """Neither str nor repr gives it away."""
    location = parse_location("https://h.example/in?X-Amz-Signature=s3cret")

    assert str(location) == "https://h.example/in"
    assert "s3cret" not in repr(location)


async def test_a_local_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    """Exactly the limit is allowed."""
    path = tmp_path / "in"
    path.write_bytes(b"x" * 1000)

    assert await read(LocalFile(path)) == b"x" * 1000
    with pytest.raises(ObjectTooLarge, match="999"):
        await read(LocalFile(path), limit_bytes=999)


async def test_what_is_no_readable_file_has_a_clear_error(tmp_path: Path) -> None:
    """Absent, a directory, a pipe: each is told apart."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ObjectNotFound, match="absent does not exist"):
        await read(LocalFile(tmp_path / "absent"))
    with pytest.raises(LocationRefused, match="is a directory"):
        await read(LocalFile(tmp_path))
    with pytest.raises(LocationRefused, match="pipe or a device"):
        await read(LocalFile(tmp_path / "pipe"))


async def test_a_local_target_is_replaced_at_once(tmp_path: Path) -> None:
    """The copy is whole and nothing else is left in the folder."""
    source, target = tmp_path / "results", tmp_path / "out.jsonl"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    await write_location(LocalFile(target), source, Access())

    assert target.read_bytes() == b"new"
    assert names_in(tmp_path) == ["out.jsonl", "results"]


async def test_a_symbolic_link_is_written_through(tmp_path: Path) -> None:
    """The link stays a link."""
    source, real, link = tmp_path / "results", tmp_path / "real", tmp_path / "link"
    source.write_bytes(b"new")
    link.symlink_to(real)

    await write_location(LocalFile(link), source, Access())

    assert link.is_symlink()
    assert real.read_bytes() == b"new"


async def test_a_target_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    """No folder, a directory, a pipe, an expired URL: found by check_output and by writing."""
    source = tmp_path / "results"
    source.touch()
    os.mkfifo(tmp_path / "pipe")
    expired = "https://h.example/out?Signature=x&Expires=1"
    targets: list[tuple[Location, type[Exception], str]] = [
        (LocalFile(tmp_path / "absent" / "out"), ObjectNotFound, "create it first"),
        (LocalFile(tmp_path), LocationRefused, "is a directory"),
        (LocalFile(tmp_path / "pipe"), LocationRefused, "device"),
        (WebUrl(expired), AccessDenied, "expired at 1970-01-01"),
    ]
    for target, error, message in targets:
        with pytest.raises(error, match=message):
            await target.check_output()
        with pytest.raises(error, match=message):
            await write_location(target, source, Access())


async def test_checking_an_output_creates_nothing(
    server: WebServer, web: WebAccess, tmp_path: Path
) -> None:
    """Neither a file nor a request: a probe would be an object."""
    await LocalFile(tmp_path / "out").check_output()
    await WebUrl(server.url()).check_output()
    await BucketObject("s3", "bucket", "key").check_output()

    assert names_in(tmp_path) == []
    assert server.requests == []


async def test_a_key_that_names_a_folder_is_no_output() -> None:
    """As with a path: an object with the name ``out/`` would be lost in every listing."""
    with pytest.raises(LocationRefused, match=r"s3://bucket/out/ is a folder: give a file"):
        await BucketObject("s3", "bucket", "out/").check_output()


async def test_a_url_is_read_and_written(server: WebServer, web: WebAccess, tmp_path: Path) -> None:
    """GET for IN, with the limit; PUT for OUT."""
    source = tmp_path / "results"
    source.write_bytes(b"results")
    server.answers = [gives(b"x" * 1000), gives(b"x" * 1000), says(200)]
    location = parse_location(server.url())

    assert await read(location, web=web) == b"x" * 1000
    with pytest.raises(ObjectTooLarge):
        await read(location, limit_bytes=999, web=web)
    await write_location(location, source, Access(web=web))

    assert [(seen.method, seen.body) for seen in server.requests][-1] == ("PUT", b"results")
