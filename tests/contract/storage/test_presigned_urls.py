"""Presigned URLs before a server that checks them: signature, method, type and expiry (F9)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from batchyard.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageUnavailable
from batchyard.locations import presigned
from batchyard.locations.download import download
from batchyard.locations.probe import probe_put
from batchyard.locations.upload import upload, upload_parts
from batchyard.locations.web import WebAccess
from tests.contract.storage.conftest import QUICK
from tests.network.faults import Fault, Faults, Wrong
from tests.network.http_proxy import HttpProxy
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


def signed(signer: Any, method: str, key: str, *, seconds: int = 60, **more: Any) -> str:
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
        *(Fault(Wrong.ANSWER_LOST), Fault(Wrong.REFUSED), None),  # the PUT
        *(Fault(Wrong.REFUSED), Fault(Wrong.ANSWER_CUT, body_bytes=2 * MIB)),  # the GET
        Fault(Wrong.ANSWER_CUT, body_bytes=MIB),
    ]
    async with HttpProxy(s3.endpoint_url, Faults(in_turn=iter(faults))).running() as proxy:
        signer = signing_client(replace(s3, endpoint_url=proxy.url), "s3v4")
        await upload(signed(signer, "put_object", prefix), path, web=WEB)
        assert s3_client.head_object(Bucket=BUCKET, Key=prefix)["ContentLength"] == len(CONTENT)

        assert await get(signed(signer, "get_object", prefix)) == CONTENT
    assert [line.split(" ")[0] for line in proxy.faults.texts] == ["PUT"] * 3 + ["GET"] * 4


async def test_an_object_replaced_between_two_connections_is_noticed(
    s3: S3Credentials, s3_client: Any, prefix: str
) -> None:
    """A real ETag, a real 412."""
    s3_client.put_object(Bucket=BUCKET, Key=prefix, Body=CONTENT)
    cut = Fault(Wrong.ANSWER_CUT, body_bytes=2 * MIB)
    async with HttpProxy(s3.endpoint_url, Faults(in_turn=iter([cut]))).running() as proxy:
        signer = signing_client(replace(s3, endpoint_url=proxy.url), "s3v4")
        url = signed(signer, "get_object", prefix)
        stream = download(url, limit_bytes=100 * MIB, web=WEB)
        await anext(stream)
        s3_client.put_object(Bucket=BUCKET, Key=prefix, Body=CONTENT[::-1])

        with pytest.raises(ObjectChanged):
            await drain(stream)


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


# -- multipart uploads ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """A multipart upload that a client has begun."""

    signer: Any
    key: str
    upload_id: str

    @classmethod
    def by(cls, signer: Any, key: str) -> Begun:
        begun = signer.create_multipart_upload(Bucket=BUCKET, Key=key)
        return cls(signer, key, begun["UploadId"])

    def part_urls(self, count: int) -> list[str]:
        return [
            signed(self.signer, "upload_part", self.key, UploadId=self.upload_id, PartNumber=n)
            for n in range(1, count + 1)
        ]

    @property
    def complete_url(self) -> str:
        return signed(self.signer, "complete_multipart_upload", self.key, UploadId=self.upload_id)


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, bytes]:
    """A file of two and a half parts."""
    content = random.Random(4).randbytes(20 * MIB + 7)
    file = tmp_path / "large.jsonl"
    file.write_bytes(content)
    return file, content


@pytest.mark.parametrize("count", [1, 3, 9])
async def test_a_file_goes_up_in_parts(
    signer: Any, prefix: str, large: tuple[Path, bytes], count: int
) -> None:
    """Into as many as there are URLs, but none of less than 8 MiB."""
    begun = Begun.by(signer, f"{prefix}/in parts.jsonl")
    await upload_parts(begun.part_urls(count), begun.complete_url, large[0], web=WEB)
    assert await get(signed(signer, "get_object", begun.key)) == large[1]


async def test_a_part_that_breaks_off_is_sent_again_by_itself(
    s3: S3Credentials, prefix: str, large: tuple[Path, bytes]
) -> None:
    direct = signing_client(s3, "s3v4")
    begun = Begun.by(direct, f"{prefix}/parts")
    # The second part, and the answer to the request that completes the upload.
    faults = [None, Fault(Wrong.REFUSED), None, None, Fault(Wrong.ANSWER_LOST)]
    async with HttpProxy(s3.endpoint_url, Faults(in_turn=iter(faults))).running() as proxy:
        near = signing_client(replace(s3, endpoint_url=proxy.url), "s3v4")
        through = replace(begun, signer=near)
        await upload_parts(through.part_urls(3), through.complete_url, large[0], web=WEB)
    assert [line.split()[0] for line in proxy.faults.texts] == ["PUT"] * 4 + ["POST"] * 2
    assert await get(signed(direct, "get_object", begun.key)) == large[1]


async def test_parts_of_an_upload_that_was_aborted_are_refused(
    signer: Any, prefix: str, large: tuple[Path, bytes]
) -> None:
    begun = Begun.by(signer, f"{prefix}/aborted")
    signer.abort_multipart_upload(Bucket=BUCKET, Key=begun.key, UploadId=begun.upload_id)
    with pytest.raises(ObjectNotFound, match="NoSuchUpload"):
        await upload_parts(begun.part_urls(3), begun.complete_url, large[0], web=WEB)


# -- asking without a write -----------------------------------------------------------------------


async def test_a_probe_writes_nothing_and_replaces_nothing(
    signer: Any, prefix: str, path: Path
) -> None:
    new, old = f"{prefix}/new", f"{prefix}/old"
    await upload(signed(signer, "put_object", old), path, web=WEB)
    for key in (new, old):
        await probe_put(signed(signer, "put_object", key), web=WEB)
    assert await get(signed(signer, "get_object", old)) == CONTENT
    with pytest.raises(ObjectNotFound):
        await get(signed(signer, "get_object", new))


@pytest.mark.parametrize("wrong", ["method", "secret", "changed"])
async def test_a_probe_finds_a_signature_that_allows_no_put(
    signer: Any, s3: S3Credentials, prefix: str, wrong: str
) -> None:
    url = {
        "method": lambda: signed(signer, "get_object", f"{prefix}/x"),
        "secret": lambda: signed(
            signing_client(replace(s3, secret_access_key="other"), "s3v4"),
            "put_object",
            f"{prefix}/x",
        ),
        "changed": lambda: signed(signer, "put_object", f"{prefix}/x").replace("/x?", "/y?"),
    }[wrong]()
    with pytest.raises(AccessDenied, match=r"SignatureDoesNotMatch.*signed for PUT"):
        await probe_put(url, web=WEB)


async def test_a_probe_of_a_server_that_is_away_says_so_and_no_more(
    signer: Any, s3: S3Credentials, prefix: str, unused_tcp_port: int
) -> None:
    away = replace(s3, endpoint_url=f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(StorageUnavailable, match="cannot be reached"):
        await probe_put(signed(signing_client(away, "s3v4"), "put_object", f"{prefix}/x"), web=WEB)
