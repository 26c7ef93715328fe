"""The API as a team runs it: PostgreSQL and a bucket instead of one machine's files."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from openai import HttpxBinaryResponseContent

from batchyard.lifecycle import BatchStatus
from batchyard.services.keys import segments_prefix
from batchyard.settings import read_settings
from batchyard.storage.bucket import S3Bucket
from batchyard.store import PATIENCE_SECONDS, upgrade
from tests.api.conftest import make_keys
from tests.api.test_batches_run import created, lines_of, runners, seen
from tests.contract.store.samples import batch_in
from tests.pages import block, replaced
from tests.patience import PATIENCE
from tests.services.postgres import postgres_for_session
from tests.services.swift import BUCKET
from tests.up.programs import run_python

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


async def test_results_are_followed_while_the_batch_runs_and_after_its_segments_are_gone(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client, runners(services):
        batch = await created(client, *(f"text {n}" for n in range(40)))
        found: list[str] = []
        after, has_more = "", True
        while has_more:
            page = await client.get(
                f"/batches/{batch.id}/results",
                cast_to=HttpxBinaryResponseContent,
                options={"params": {"after": after, "limit": 7}},
            )
            found += [json.loads(line)["custom_id"] for line in page.content.splitlines()]
            after = page.response.headers["x-next-after"]
            has_more = page.response.headers["x-has-more"] == "true"
        assert sorted(found) == sorted(f"id-{n}" for n in range(40))
        for key in [each async for each in services.storage.list(segments_prefix(batch.id))]:
            await services.storage.delete(key)
        line: Any = await client.get(f"/batches/{batch.id}/results/id-7", cast_to=object)
        assert line["custom_id"] == "id-7"


@pytest.fixture
def trusting(settings: Settings) -> None:
    """The bucket is on this machine. To be asked for ahead of ``api`` and ``services``."""
    settings.allow_private_urls = True


async def test_results_go_to_a_multipart_upload_as_the_page_says(
    trusting: None, api: Api, services: Services, s3: S3Credentials, tmp_path: Path
) -> None:
    key = secrets.token_hex(8)
    async with api.async_openai() as client, runners(services):
        batch = await seen(client, (await created(client, "one", "two")).id, "completed")
        program = replaced(
            block("docs/how-to/use-the-api.md", "parts"),
            {"batch_abc123": batch.id, '"results", ': f'"{BUCKET}", ', "answers.jsonl": key},
        )
        environment = {**os.environ, "OPENAI_BASE_URL": api.url, "OPENAI_API_KEY": api.key}
        await asyncio.to_thread(run_python, program, tmp_path, environment)
        deliveries = services.store.deliveries
        async with asyncio.timeout(PATIENCE * 60):
            while (await deliveries.page(batch_id=batch.id))[0].ended_at is None:  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.05)
        content = (await client.files.content(batch.output_file_id)).content
    bucket = S3Bucket(BUCKET, s3)
    assert b"".join([part async for part in bucket.read(key)]) == content
    await bucket.close()


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
