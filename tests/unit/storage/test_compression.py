"""gzip and zstd, unpacked while they arrive and packed while they leave."""

from __future__ import annotations

import gzip
import resource
from typing import TYPE_CHECKING

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.errors import LocationRefused, ObjectTooLarge
from batchyard.storage.compression import packed, packed_suffix, unpacked, unpacked_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

MIB = 1024**2
LINES = b"".join(b'{"custom_id": "%d", "body": {}}\n' % n for n in range(50_000))
SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
"""A frame with no content, as pzstd writes."""


TOO_LONG = (
    "a needs a window of more than 8 MiB: compress it with zstd's level 19 or lower, and without "
    "--long"
)


def with_window(log: int) -> bytes:
    """A stream whose reader has to keep 2 to the power of ``log`` bytes."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return packer.compress(LINES) + packer.flush()


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def content(
    data: bytes, name: str = "in.jsonl", *, limit_bytes: int = 100 * MIB, size: int = MIB
) -> bytes:
    parts = unpacked(pieces(data, size), name, limit_bytes=limit_bytes)
    return b"".join([part async for part in parts])


@pytest.mark.parametrize("size", [1000, MIB])
@pytest.mark.parametrize(
    "data",
    [
        LINES,
        gzip.compress(LINES),
        zstd.compress(LINES),
        gzip.compress(LINES[:1000]) + gzip.compress(b"") + gzip.compress(LINES[1000:]),
        zstd.compress(LINES[:1000]) + SKIPPED + zstd.compress(LINES[1000:]),
        SKIPPED + zstd.compress(LINES),
        gzip.compress(LINES) + bytes(100_000),
        with_window(23),
    ],
    ids=["plain", "gzip", "zstd", "members", "frames", "skipped", "zeros", "window"],
)
async def test_the_content_of_a_file_is_the_same_however_it_is_packed(
    data: bytes, size: int
) -> None:
    assert await content(data, size=size) == LINES


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=3000).map(lambda data: data * 40), min_size=1, max_size=5),
    st.integers(min_value=1, max_value=5000),
    st.sampled_from([gzip.compress, zstd.compress]),
)
async def test_any_members_cut_anywhere_are_the_same_bytes(
    contents: list[bytes], size: int, pack: Callable[[bytes], bytes]
) -> None:
    data = b"".join(map(pack, contents))
    assert await content(data, size=size) == b"".join(contents)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"])
async def test_the_bytes_decide_and_not_the_name(name: str) -> None:
    for data in (LINES, gzip.compress(LINES), zstd.compress(LINES)):
        assert await content(data, name) == LINES


@pytest.mark.parametrize("data", [b"", b"{", b"\xef\xbb\xbf{}", b"\n{}"])
async def test_a_short_file_stays_as_it_is(data: bytes) -> None:
    assert await content(data) == data


@pytest.mark.parametrize(
    ("data", "name", "said"),
    [
        (gzip.compress(LINES)[:-1], "a.gz", "a.gz is cut off: its compressed data have no end"),
        (zstd.compress(LINES)[:-1], "a", "a is cut off: its compressed data have no end"),
        (gzip.compress(LINES)[:8], "a", "a is cut off: its compressed data have no end"),
        (gzip.compress(LINES) + b"more", "a", "a is damaged: it is not valid gzip"),
        (gzip.compress(LINES)[:-8] + bytes(8), "a", "a is damaged: it is not valid gzip"),
        (zstd.compress(LINES) + b"more", "a", "a is damaged: it is not valid zstd"),
        (b"\x28\xb5\x2f\xfd" + bytes([255]) * 999, "a", "a is damaged: it is not valid zstd"),
        (with_window(24), "a", TOO_LONG),
        (
            b"<html>",
            "a.jsonl.gz",
            "a.jsonl.gz is neither compressed with gzip or zstd, as its name says, nor JSON Lines",
        ),
        (
            b"",
            "a.zst",
            "a.zst is neither compressed with gzip or zstd, as its name says, nor JSON Lines",
        ),
    ],
    ids=[
        *("gzip cut", "zstd cut", "head only", "gzip and more", "checksum", "zstd and more"),
        *("zstd damaged", "window", "a page", "nothing"),
    ],
)
async def test_what_is_not_whole_is_refused_in_words(data: bytes, name: str, said: str) -> None:
    with pytest.raises(LocationRefused) as raised:
        await content(data, name)
    assert str(raised.value) == said


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
async def test_a_file_is_refused_as_soon_as_its_content_is_over_the_limit(
    pack: Callable[[bytes], bytes],
) -> None:
    """Of 200 MiB of content no more than the limit comes out."""
    bomb = unpacked(pieces(pack(bytes(200 * MIB)), MIB), "a", limit_bytes=3 * MIB)
    assert [len(await anext(bomb)) for _ in range(3)] == [MIB] * 3
    with pytest.raises(ObjectTooLarge, match=r"a is larger than 3145728 bytes when decompressed"):
        await anext(bomb)


async def test_content_of_just_the_limit_passes() -> None:
    assert await content(gzip.compress(LINES), limit_bytes=len(LINES)) == LINES
    with pytest.raises(ObjectTooLarge):
        await content(gzip.compress(LINES), limit_bytes=len(LINES) - 1)


async def test_a_file_without_a_limit_may_not_be_thousands_of_times_as_large() -> None:
    """The operator's own files may have any size. This one would fill the disk."""
    bomb = zstd.compress(bytes(64 * MIB)) * 40
    with pytest.raises(LocationRefused, match="more than 20000 times as many"):
        async for _ in unpacked(pieces(bomb, MIB), "a", limit_bytes=2**50):
            pass


async def test_a_hundred_thousand_members_take_no_long_time() -> None:
    """zlib copies what is behind each member. A block of a MiB has tens of thousands of them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert await content(gzip.compress(b"") * 100_000 + gzip.compress(b"{}")) == b"{}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 10


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "OUT.GZ"])
@pytest.mark.parametrize("size", [0, 100, len(LINES)])
async def test_what_is_packed_other_tools_read(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "plain"
    path.write_bytes(LINES[:size])
    data = b"".join([part async for part in packed(path, name)])
    unpack = gzip.decompress if name.lower().endswith(".gz") else zstd.decompress
    assert unpack(data) == LINES[:size]


def test_a_name_says_how_its_file_is_packed() -> None:
    assert [packed_suffix(name) for name in ("a.gz", "a.jsonl.ZST", "a.jsonl", ".gz")] == [
        *(".gz", ".zst", "", ".gz")
    ]
    assert unpacked_name("a.jsonl.GZ") == "a.jsonl"
    assert unpacked_name("a.gzip") == "a.gzip"
