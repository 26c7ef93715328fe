"""Presigned URLs before a server that checks them: signature, method, type and expiry (F9)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from batchyard.errors import AccessDenied, ObjectChanged, ObjectNotFound
from batchyard.storage import presigned
from batchyard.storage.download import download
from batchyard.storage.upload import upload
from batchyard.storage.web import WebAccess
from tests.contract.storage.conftest import QUICK
from tests.contract.storage.faulty_proxy import Fault, FaultyProxy
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials

MIB = 1024 * 1024
CONTENT = random.Random(3).randbytes(3 * MIB + 5)
WEB = WebAccess(backoff=QUICK)


@pytest.fixture(params=["s3", "s3v4"])
def signer(request: pytest.FixtureRequest, s3: S3Credentials) -> Any:
    """A client that signs URLs with version 2 or version 4."""
    return signing_client(s3, request.param)


def signing_client(s3: S3Credentials, version: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=s3.endpoint_url,
        region_name=s3.region,
        aws_access_key_id=s3.access_key_id,
        aws_secret_access_key=s3.secret_access_key,
        config=Config(signature_version=version, s3={"addressing_style": "path"}),
    )


def signed(signer: Any, method: str, key: str, *, seconds: int = 60, **more: str) -> str:
    named = {"Bucket": BUCKET, "Key": key, **more}
    return str(signer.generate_presigned_url(method, Params=named, ExpiresIn=seconds))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three blocks and a bit."""
    file = tmp_path / "results.jsonl"
    file.write_bytes(CONTENT)
    return file


async def get(url: str) -> bytes:
    return b"".join([block async for block in download(url, limit_bytes=100 * MIB, web=WEB)])


@pytest.mark.parametrize("key", ["out.jsonl", "a b/ü+%&=?.jsonl"])
async def test_a_file_goes_up_and_comes_back(
    signer: Any, prefix: str, path: Path, key: str
) -> None:
    """Also under a key whose every other character needs escaping."""
    await upload(signed(signer, "put_object", f"{prefix}/{key}"), path, web=WEB)

    assert await get(signed(signer, "get_object", f"{prefix}/{key}")) == CONTENT


async def test_a_url_signed_with_octet_stream_is_served(
    signer: Any, prefix: str, path: Path
) -> None:
    """What users of vLLM's run-batch sign."""
    url = signed(signer, "put_object", prefix, ContentType="application/octet-stream")

    await upload(url, path, web=WEB)

    assert await get(signed(signer, "get_object", prefix)) == CONTENT


@pytest.mark.parametrize("method", ["get_object", "put_object"])
async def test_an_expired_url_is_denied(
    signer: Any, prefix: str, path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our own clock; and by the server's, when ours is an hour behind."""
    url = signed(signer, method, prefix, seconds=1)
    await asyncio.sleep(1.1)
    attempt = get if method == "get_object" else lambda url: upload(url, path, web=WEB)

    with pytest.raises(AccessDenied, match="expired at"):
        await attempt(url)
    monkeypatch.setattr(presigned, "_now", lambda: datetime.now(UTC) - timedelta(hours=1))
    with pytest.raises(AccessDenied, match="the server answered 403 AccessDenied"):
        await attempt(url)


async def test_a_wrong_signature_is_denied(
    s3: S3Credentials, s3_client: Any, prefix: str, path: Path
) -> None:
    """Nothing is stored, and the message repeats S3's code."""
    stranger = signing_client(replace(s3, secret_access_key="guessed"), "s3v4")

    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
        await upload(signed(stranger, "put_object", prefix), path, web=WEB)
    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
        await get(signed(stranger, "get_object", prefix))
    assert "Contents" not in s3_client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)


async def test_a_url_for_reading_does_not_write(signer: Any, prefix: str, path: Path) -> None:
    """The method is part of the signature."""
    with pytest.raises(AccessDenied):
        await upload(signed(signer, "get_object", prefix), path, web=WEB)


async def test_an_absent_object_is_not_found(signer: Any, prefix: str) -> None:
    """A good signature for nothing."""
    with pytest.raises(ObjectNotFound, match="NoSuchKey"):
        await get(signed(signer, "get_object", prefix))


async def test_a_broken_way_to_the_server_costs_no_byte(
    s3: S3Credentials, s3_client: Any, prefix: str, path: Path
) -> None:
    """Lost replies, 503s and cuts in both directions: the same content at the end."""
    faults = [
        *(Fault(cut_reply_after_bytes=0), Fault(slow_down=True), Fault()),  # the PUT
        *(Fault(slow_down=True), Fault(cut_reply_after_bytes=2 * MIB)),  # the GET
        Fault(cut_reply_after_bytes=MIB),
    ]
    async with FaultyProxy(s3.endpoint_url, iter(faults)).running() as proxy:
        signer = signing_client(replace(s3, endpoint_url=proxy.endpoint_url), "s3v4")
        await upload(signed(signer, "put_object", prefix), path, web=WEB)
        assert s3_client.head_object(Bucket=BUCKET, Key=prefix)["ContentLength"] == len(CONTENT)

        assert await get(signed(signer, "get_object", prefix)) == CONTENT
    assert [line.split(" ")[0] for line in proxy.requests] == ["PUT"] * 3 + ["GET"] * 4


async def test_an_object_replaced_between_two_connections_is_noticed(
    s3: S3Credentials, s3_client: Any, prefix: str
) -> None:
    """A real ETag, a real 412."""
    s3_client.put_object(Bucket=BUCKET, Key=prefix, Body=CONTENT)
    cut = Fault(cut_reply_after_bytes=2 * MIB)
    async with FaultyProxy(s3.endpoint_url, iter([cut])).running() as proxy:
        signer = signing_client(replace(s3, endpoint_url=proxy.endpoint_url), "s3v4")
        url = signed(signer, "get_object", prefix)
        stream = download(url, limit_bytes=100 * MIB, web=WEB)
        await anext(stream)
        s3_client.put_object(Bucket=BUCKET, Key=prefix, Body=CONTENT[::-1])

        with pytest.raises(ObjectChanged):
            await drain(stream)


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass
