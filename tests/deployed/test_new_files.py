"""Files in S3 become batches when an event says so: docs/how-to/submit-new-files.md."""

from __future__ import annotations

import asyncio
import json
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import pytest
import pytest_asyncio
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import S3CredentialsBlock
from commands.prefect.objects import CREDENTIALS_BLOCK
from examples import s3_events, watch_prefix
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
        await S3CredentialsBlock(**given).save(CREDENTIALS_BLOCK, overwrite=True)
        yield
        await S3CredentialsBlock.adelete(CREDENTIALS_BLOCK)


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


async def put(client: Any, home: str, objects: dict[str, bytes]) -> list[str]:
    """Upload them into the folder `incoming` of the home; their keys."""
    bucket, _, prefix = home.partition("/")
    keys = [f"{prefix}/incoming/{name}" for name in objects]
    for key, content in zip(keys, objects.values(), strict=True):
        await asyncio.to_thread(client.put_object, Bucket=bucket, Key=key, Body=content)
    return keys


async def nth_run_of_an_automation(deployment: Deployment, number: int) -> dict[str, Any]:
    """The flow run of this number, from 1, once it is completed; the schedule's do not count."""

    async def completed() -> dict[str, Any] | None:
        is_completed = {"type": {"any_": ["COMPLETED"]}}
        runs = await deployment.flow_runs("submit-new-files", state=is_completed)
        ours = [run for run in runs if run["created_by"]["type"] == "AUTOMATION"]
        return ours[number - 1] if len(ours) >= number else None

    found: dict[str, Any] = await until(completed)
    return found


@pytest.mark.usefixtures("s3_block")
async def test_new_objects_become_batches_once_when_events_tell_of_them(
    deployment: Deployment, s3: S3Credentials
) -> None:
    """Two good objects and a bad one, by an automation; further events make nothing new."""
    await deployment.serve(MODEL)
    client = s3.client()
    home = f"{BUCKET}/{secrets.token_hex(8)}"
    keys = await put(
        client, home, {"a b.jsonl": lines("a"), "bad.jsonl": b"no json\n", "c.jsonl": lines("c")}
    )
    words = replaced(block(PAGE, "watch"), {"s3://data": f"s3://{home}"}).split()
    await deployment.run(*words)

    with temporary_settings({PREFECT_API_URL: deployment.server.api_url}):
        assert await s3_events.tell(notification(*keys)) == 3
        first = await nth_run_of_an_automation(deployment, 1)
        assert first["state"]["message"] == "batches created: 3"
        batches = [
            await deployment.ended_batch(each.id)
            for each in await deployment.services.store.batches.page(limit=3)
        ]
        statuses = sorted(each.status.value for each in batches)
        assert statuses == ["completed", "completed", "failed"]
        await s3_events.tell(notification(keys[0]))
        again = await nth_run_of_an_automation(deployment, 2)
        assert again["state"]["message"] == "batches created: 0, files that had one already: 3"
        async with get_client() as prefect:
            (schedule,) = (await prefect.read_deployment_by_name(watch_prefix.DEPLOYMENT)).schedules
            await watch_prefix.stop(prefect, f"s3://{home}/incoming/")
            left = await prefect.read_deployment_by_name(watch_prefix.DEPLOYMENT)
            automations = await prefect.read_automations()
    assert schedule.parameters == first["parameters"]
    assert schedule.schedule.interval == timedelta(minutes=5)
    assert (left.schedules, automations) == ([], [])
    found = await asyncio.to_thread(
        client.list_objects_v2, Bucket=BUCKET, Prefix=f"{home.partition('/')[2]}/results/"
    )
    names = [each["Key"].rpartition("/")[2] for each in found["Contents"]]
    assert names == ["a b.results.jsonl", "c.results.jsonl"]
