"""The API as a team runs it: PostgreSQL and a bucket instead of one machine's files."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.settings import read_settings
from batchyard.store import PATIENCE_SECONDS, upgrade
from tests.api.conftest import make_keys
from tests.api.test_batches_run import created, lines_of, runners, seen
from tests.contract.store.samples import batch_in
from tests.services.postgres import postgres_for_session
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.storage.bucket import S3Credentials
    from tests.api.conftest import Api


@pytest.fixture
def settings(
    request: pytest.FixtureRequest,
    s3: S3Credentials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Settings:
    assert s3.secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key_id or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_access_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3.region or "")
    cluster = postgres_for_session(request)
    database_url = cluster.url(asyncio.run(cluster.create_database()))
    asyncio.run(upgrade(database_url, patience_seconds=PATIENCE_SECONDS))
    return read_settings(
        home=tmp_path / "home",
        database_url=database_url,
        storage=f"s3://{BUCKET}/{secrets.token_hex(8)}",
        flush_seconds=0.05,
    )


@pytest.fixture
def keys(settings: Settings) -> tuple[str, str]:
    return asyncio.run(make_keys(settings))


async def test_a_batch_from_upload_to_download_and_away(api: Api, services: Services) -> None:
    async with api.async_openai() as client, runners(services):
        batch = await seen(client, (await created(client, "one", "two")).id, "completed")
        lines = await lines_of(client, batch.output_file_id)
        assert [line["response"]["status_code"] for line in lines] == [200, 200]
        assert (await client.files.delete(batch.output_file_id)).deleted
        gone = await client.with_options(max_retries=0).files.list(purpose="batch_output")
        assert gone.data == []


async def test_an_upload_in_parts_is_put_together_in_the_bucket(api: Api) -> None:
    async with api.async_openai() as client:
        line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
        content = line * 3
        upload = await client.uploads.create(
            bytes=len(content), filename="in.jsonl", mime_type="text/jsonl", purpose="batch"
        )
        parts = [
            await client.uploads.parts.create(upload.id, data=data)
            for data in (content[100:], content[:100])
        ]
        done = await client.uploads.complete(upload.id, part_ids=[parts[1].id, parts[0].id])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == content


async def test_webhooks_are_managed_and_what_was_sent_is_listed(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        made = await client.webhooks.create(
            name="n", url="https://example.com/in", event_types=["batch.completed"]
        )
        await client.webhooks.update(made.id, event_types=["batch.completed", "batch.failed"])
        rotated = await client.webhooks.rotate_secret(made.id)
        assert [each.signing_secret_hint async for each in client.webhooks.list(limit=1)] == [
            rotated.signing_secret_hint
        ]
        await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
        with api.http() as http:
            (found,) = http.get("/deliveries", params={"status": "pending"}).json()["data"]
            assert found["webhook_endpoint_id"] == made.id
            assert http.get(f"/deliveries/{found['id']}").json()["attempts"] == []
            assert http.post("/webhook_secret").status_code == 200
        assert (await client.webhooks.delete(made.id)).deleted
