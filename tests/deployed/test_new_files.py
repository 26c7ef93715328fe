"""Files in S3 become batches when an event says so: docs/how-to/submit-new-files.md."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import pytest
import pytest_asyncio
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import S3CredentialsBlock
from commands.prefect_objects import S3_BLOCK
from examples import s3_events
from tests.deployed.conftest import until
from tests.pages import block, replaced
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.storage.bucket import S3Credentials
    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "docs/how-to/submit-new-files.md"
MODEL = "new-files-model"


@pytest_asyncio.fixture(loop_scope="module")
async def s3_block(deployment: Deployment, s3: S3Credentials) -> AsyncIterator[None]:
    """The credentials of the workers; those of other tests have none."""
    given = {
        "endpoint_url": s3.endpoint_url,
        "region": s3.region,
        "access_key_id": s3.access_key_id,
        "secret_access_key": s3.secret_access_key,
    }
    with temporary_settings({PREFECT_API_URL: deployment.server.api_url}):
        await S3CredentialsBlock(**given).save(S3_BLOCK, overwrite=True)
        yield
        await S3CredentialsBlock.adelete(S3_BLOCK)


def lines(name: str) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": name}], "max_tokens": 8}
    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def notification(*keys: str) -> dict[str, Any]:
    """What S3 sends, as far as it matters here."""
    bucket = {"name": BUCKET}
    return {
        "Records": [
            {
                "eventName": "ObjectCreated:Put",
                "s3": {"bucket": bucket, "object": {"key": quote_plus(key, safe="/")}},
            }
            for key in keys
        ]
    }


@pytest.mark.usefixtures("s3_block")
async def test_new_objects_become_batches_once_when_events_tell_of_them(
    deployment: Deployment, s3: S3Credentials
) -> None:
    """Two good objects and a bad one, by an automation; further events make nothing new."""
    await deployment.serve(MODEL)
    client = s3.client()
    home = secrets.token_hex(8)
    objects = {"a b.jsonl": lines("a"), "bad.jsonl": b"no json\n", "c.jsonl": lines("c")}
    keys = [f"{home}/incoming/{name}" for name in objects]
    for key, content in zip(keys, objects.values(), strict=True):
        await asyncio.to_thread(client.put_object, Bucket=BUCKET, Key=key, Body=content)
    words = replaced(block(PAGE, "watch"), {"s3://data": f"s3://{BUCKET}/{home}"}).split()
    await deployment.run(*words)

    async def runs() -> list[dict[str, Any]]:
        return await deployment.flow_runs("submit-new-files", state={"type": {"any_": ["COMPLETED"]}})

    async def ended(count: int) -> dict[str, Any] | None:
        found = [run for run in await runs() if run["created_by"]["type"] == "AUTOMATION"]
        return found[-1] if len(found) == count else None

    try:
        with temporary_settings({PREFECT_API_URL: deployment.server.api_url}):
            assert await s3_events.tell(notification(*keys)) == 3
            first = await until(lambda: ended(1))
            assert first["state"]["message"] == "batches created: 3"
            created = await deployment.services.store.batches.page(limit=3)
            batches = [await deployment.ended_batch(each.id) for each in created]
            assert sorted(each.status.value for each in batches) == [
                "completed",
                "completed",
                "failed",
            ]
            await s3_events.tell(notification(keys[0]))
            again = await until(lambda: ended(2))
        assert again["state"]["message"] == (
            "batches created: 0, files that had one already: 3"
        )
        found = await asyncio.to_thread(
            client.list_objects_v2, Bucket=BUCKET, Prefix=f"{home}/results/"
        )
        assert [each["Key"].rpartition("/")[2] for each in found["Contents"]] == [
            "a b.results.jsonl",
            "c.results.jsonl",
        ]
    finally:
        await deployment.run(*words, "--stop")
