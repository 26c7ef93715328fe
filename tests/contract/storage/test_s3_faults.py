"""S3 that answers badly: the faults of F7, F8 and F18, put between boto3 and a real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    StorageUnavailable,
)
from batchyard.storage import bucket as bucket_module
from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.bucket_storage import BucketStorage
from tests.contract.storage.conftest import PART_BYTES, QUICK
from tests.network.faults import Fault, Faults, Wrong
from tests.network.http_proxy import HttpProxy
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from batchyard.storage.backoff import Backoff

MIB = 1024 * 1024
LARGE = random.Random(1).randbytes(2 * PART_BYTES + 12_345)
SLOW_DOWN = Fault(Wrong.REFUSED)
LOST_REPLY = Fault(Wrong.ANSWER_LOST)


async def parts_of(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 700_000):
        yield content[start : start + 700_000]


@contextlib.asynccontextmanager
async def storage_behind(
    s3: S3Credentials, prefix: str, faults: Iterable[Fault | None], backoff: Backoff = QUICK
) -> AsyncIterator[tuple[BucketStorage, HttpProxy]]:
    """An BucketStorage whose every request goes through the faulty proxy."""
    async with HttpProxy(s3.endpoint_url, Faults(in_turn=iter(faults))).running() as proxy:
        behind = replace(s3, endpoint_url=proxy.url)
        bucket = S3Bucket(BUCKET, behind, part_bytes=PART_BYTES, backoff=backoff)
        storage = BucketStorage(bucket, prefix)
        yield storage, proxy
        await storage.close()


async def read(storage: BucketStorage, key: str) -> bytes:
    return b"".join([block async for block in storage.get(key)])


async def test_an_upload_survives_slow_down_and_lost_replies(
    s3: S3Credentials, prefix: str, s3_storage: BucketStorage
) -> None:
    """With 30 % of the requests failing, a multipart upload ends with the right content."""
    dice = random.Random(7)
    faults = (dice.choice([SLOW_DOWN, LOST_REPLY]) for _ in iter(int, 1))
    mixed = (next(faults) if dice.random() < 0.3 else None for _ in iter(int, 1))
    async with storage_behind(s3, prefix, mixed, replace(QUICK, attempts=12)) as (storage, _):
        for number in range(4):
            await storage.put(f"files/{number}", parts_of(LARGE))

        assert [key async for key in storage.list("files/")] == [f"files/{n}" for n in range(4)]
    for number in range(4):
        assert await read(s3_storage, f"files/{number}") == LARGE


async def test_a_cut_download_goes_on_where_it_broke(
    s3: S3Credentials, prefix: str, s3_storage: BucketStorage
) -> None:
    """Three broken connections, and every byte is fetched about once."""
    await s3_storage.put("in", parts_of(LARGE))
    cuts = [
        Fault(Wrong.ANSWER_CUT, body_bytes=3 * MIB),
        Fault(Wrong.ANSWER_CUT, body_bytes=2 * MIB),
        LOST_REPLY,
    ]

    async with storage_behind(s3, prefix, cuts) as (storage, proxy):
        assert await read(storage, "in") == LARGE

    assert len(proxy.faults.texts) == 4


async def test_an_object_replaced_between_two_connections_is_noticed(
    s3: S3Credentials, prefix: str, s3_storage: BucketStorage
) -> None:
    """The bytes of two versions are never mixed: the resumed read raises ObjectChanged."""
    await s3_storage.put("in", parts_of(LARGE))
    async with storage_behind(s3, prefix, [Fault(Wrong.ANSWER_CUT, body_bytes=2 * MIB)]) as (
        storage,
        _,
    ):
        blocks = storage.get("in")
        await anext(blocks)
        await s3_storage.put("in", parts_of(LARGE[::-1]))

        with pytest.raises(ObjectChanged, match="in was replaced"):
            async for _block in blocks:
                pass


async def test_an_object_removed_between_two_connections_is_noticed(
    s3: S3Credentials, prefix: str, s3_storage: BucketStorage
) -> None:
    """An object that goes away midway has changed; it is not reported as never there."""
    await s3_storage.put("in", parts_of(LARGE))
    async with storage_behind(s3, prefix, [Fault(Wrong.ANSWER_CUT, body_bytes=2 * MIB)]) as (
        storage,
        _,
    ):
        blocks = storage.get("in")
        await anext(blocks)
        await s3_storage.delete("in")

        with pytest.raises(ObjectChanged, match="removed"):
            async for _block in blocks:
                pass


async def test_s3_that_stays_down_is_given_up(s3: S3Credentials, prefix: str) -> None:
    """Retries are bounded, and the error is retriable for whoever is above."""
    async with storage_behind(s3, prefix, itertools.repeat(SLOW_DOWN)) as (storage, proxy):
        with pytest.raises(StorageUnavailable, match="503 SlowDown") as raised:
            await storage.put("out", parts_of(b"content"))

    assert raised.value.is_retriable
    assert len(proxy.faults.texts) == QUICK.attempts


async def test_an_unreachable_endpoint_is_unavailable(s3: S3Credentials) -> None:
    """Nobody listens: StorageUnavailable after the retries."""
    bucket = S3Bucket(BUCKET, replace(s3, endpoint_url="http://127.0.0.1:9"), backoff=QUICK)

    with pytest.raises(StorageUnavailable):
        await bucket.size("in")


async def test_a_wrong_secret_is_denied_at_once(
    s3: S3Credentials, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """403 is not retried, and neither the error nor the log holds the secret."""
    caplog.set_level(logging.DEBUG, logger="batchyard")
    wrong = replace(s3, secret_access_key="wr0ng-secret")
    async with storage_behind(wrong, prefix, []) as (storage, proxy):
        with pytest.raises(AccessDenied, match="SignatureDoesNotMatch") as raised:
            await storage.put("out", parts_of(b"content"))

    assert len(proxy.faults.texts) == 1
    assert "wr0ng-secret" not in f"{raised.value} {wrong!r} {caplog.text}"


async def test_a_bucket_that_does_not_exist_is_named(s3: S3Credentials) -> None:
    """The message says which bucket is missing."""
    bucket = S3Bucket("nowhere", s3, backoff=QUICK)

    with pytest.raises(ObjectNotFound, match="nowhere"):
        await bucket.write("out", parts_of(b"content"))


async def test_a_storage_is_made_of_a_bucket_s_name(s3: S3Credentials, prefix: str) -> None:
    """Name, prefix and credentials are all that an operator gives."""
    storage = BucketStorage(S3Bucket(BUCKET, s3), f"/{prefix}/")

    await storage.put("files/a", parts_of(b"content"))

    assert await read(storage, "files/a") == b"content"
    await storage.close()


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    """The mistake shows when the storage is built, not at the first write."""
    with pytest.raises(LocationRefused, match="https://"):
        S3Bucket(BUCKET, S3Credentials(endpoint_url="s3.example.org"))


async def test_a_failed_upload_leaves_no_invisible_parts(
    s3_storage: BucketStorage, s3_client: Any, prefix: str
) -> None:
    """The multipart upload is aborted when its source fails."""

    async def breaking() -> AsyncIterator[bytes]:
        async for part in parts_of(LARGE):
            yield part
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await s3_storage.put("out", breaking())

    assert "Uploads" not in s3_client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)


async def test_an_upload_cancelled_at_any_moment_leaves_nothing(
    s3_storage: BucketStorage, s3_client: Any, prefix: str
) -> None:
    """Before, while and after the upload is opened, and while a part is on its way."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MIB)

    for delay_seconds in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16):
        putting = asyncio.create_task(s3_storage.put("out", endless()))
        await asyncio.sleep(delay_seconds)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting

    assert "Uploads" not in s3_client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    assert [key async for key in s3_storage.list("")] == []


async def test_an_object_of_more_than_ten_thousand_parts_has_larger_ones(
    monkeypatch: pytest.MonkeyPatch, s3_client: Any, s3_storage: BucketStorage, prefix: str
) -> None:
    """The results of a large batch have more than 80 GiB, and would be made again without end."""
    monkeypatch.setattr(bucket_module, "_PARTS_OF_ONE_SIZE", 2)
    monkeypatch.setattr(bucket_module, "_JOINED", 2)
    content = b"".join(bytes([n]) * PART_BYTES for n in range(5)) + b"end"

    async def parts() -> AsyncIterator[bytes]:
        yield content

    stored = await s3_storage.put("out", parts())
    assert stored.size_bytes == len(content)
    assert b"".join([part async for part in s3_storage.get("out")]) == content
    made = s3_client.head_object(Bucket=BUCKET, Key=f"{prefix}/out")
    assert made["ETag"].endswith('-4"')  # two of one size, one of two, and the rest


async def test_more_parts_than_s3_takes_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, s3_storage: BucketStorage
) -> None:
    monkeypatch.setattr(bucket_module, "_MOST_PARTS", 1)

    async def parts() -> AsyncIterator[bytes]:
        yield bytes(PART_BYTES + 1)

    with pytest.raises(ObjectTooLarge, match="more parts than S3 takes"):
        await s3_storage.put("out", parts())


async def test_an_upload_holds_a_few_parts_only(s3_storage: BucketStorage) -> None:
    """Sixty MiB go up while the process's Python memory grows by three parts."""
    part = bytes(MIB)

    async def sixty_mib() -> AsyncIterator[bytes]:
        for _ in range(60):
            yield part

    tracemalloc.start()
    try:
        await s3_storage.put("out", sixty_mib())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 3.5 * PART_BYTES
