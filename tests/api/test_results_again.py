"""``POST /batches/{id}/results``: what is kept goes to a new URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.locations.location import parse_location
from batchyard.locations.parted_url import PartedUrl
from batchyard.store import NewFile
from batchyard.wire import BatchUsage, RequestCounts
from tests.contract.store.outbox_samples import NO_LIMITS, raw_rows
from tests.contract.store.samples import batch_in, begun_batch

if TYPE_CHECKING:
    import httpx

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from tests.api.conftest import Api

URL = "https://bucket.example.com/out?X-Amz-Signature=hunter2"


async def ended(services: Services, tenant: str = "one") -> BatchRecord:
    """A completed batch with an output file and no error file."""
    store = services.store
    batch = await begun_batch(store, tenant=tenant)
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    file = NewFile(
        purpose="batch_output",
        filename="out.jsonl",
        size_bytes=3,
        sha256="ab" * 32,
        storage_key="files/file-x",
        tenant=tenant,
    )
    return await store.batches.finish(
        batch.id,
        target=BatchStatus.COMPLETED,
        output=file,
        error=None,
        counts=RequestCounts(batch.counts.total, batch.counts.total, 0),
        usage=BatchUsage(),
    )


def ask(api: Api, batch_id: str, key: str | None = None, **body: Any) -> httpx.Response:
    with api.http(key) as client:
        return client.post(f"/batches/{batch_id}/results", json=body)


async def test_a_kept_file_is_to_be_delivered(api: Api, services: Services) -> None:
    """The answer is the delivery, which can be looked at until it has come to its end."""
    batch = await ended(services)
    answer = ask(api, batch.id, output_url=URL)
    assert answer.status_code == 200, answer.text
    (delivery,) = answer.json()["data"]
    assert delivery["kind"] == "file"
    assert delivery["event_type"] == "batch.output_file"
    assert delivery["file_id"] == batch.output_file_id
    assert (delivery["recipient"], delivery["status"]) == ("bucket.example.com", "pending")
    with api.http() as client:
        shown = client.get(f"/deliveries/{delivery['id']}").json()
        listed = client.get("/deliveries", params={"batch_id": batch.id}).json()["data"]
    assert shown == {**delivery, "attempts": []}
    assert listed == [delivery]
    assert "hunter2" not in answer.text + str(await raw_rows(services.store, "deliveries"))


async def test_another_tenants_batch_is_not_found(api: Api, services: Services) -> None:
    batch = await ended(services)
    foreign = ask(api, batch.id, api.other_key, output_url=URL)
    unknown = ask(api, "batch_" + "0" * 32, api.other_key, output_url=URL)
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json()["error"]["code"] == unknown.json()["error"]["code"]
    assert (await services.store.deliveries.page()) == []


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS])
async def test_a_batch_that_has_not_ended_gets_other_urls(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one")
    assert ask(api, batch.id, api.other_key, output_url=URL).status_code == 404
    answer = ask(api, batch.id, output_url=URL)
    assert (answer.status_code, answer.json()["data"]) == (200, [])
    places = await services.store.batch_places.locations(batch.id)
    assert (places.output, places.error) == (URL, None)
    assert (await services.store.deliveries.page(batch_id=batch.id)) == []


async def test_a_file_does_not_go_to_the_url_where_the_other_one_stays(
    api: Api, services: Services
) -> None:
    """The error file would replace the answers there."""
    batch = await batch_in(services.store, BatchStatus.IN_PROGRESS, tenant="one")
    assert ask(api, batch.id, output_url=URL).status_code == 200
    answer = ask(api, batch.id, error_url=URL)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "error_url")
    assert "hunter2" not in answer.text
    assert ask(api, batch.id, output_url=f"{URL}2", error_url=URL).status_code == 200


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
async def test_while_its_files_are_made_a_batch_gets_no_other_urls(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one")
    answer = ask(api, batch.id, output_url=URL)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "batch_not_ended"


async def test_a_file_is_to_be_delivered_in_parts(api: Api, services: Services) -> None:
    batch = await ended(services)
    upload = {"part_urls": [URL, f"{URL}2"], "complete_url": f"{URL}3"}
    answer = ask(api, batch.id, output_upload=upload)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["recipient"] == "bucket.example.com"
    (claim,) = await services.store.deliveries.claim(
        "me", lease_seconds=9, limit=9, limits=NO_LIMITS
    )
    assert parse_location(str(claim.url)) == PartedUrl((URL, f"{URL}2"), f"{URL}3")
    assert "hunter2" not in answer.text + str(await raw_rows(services.store, "deliveries"))


@pytest.mark.parametrize(
    ("upload", "param", "words"),
    [
        ({"part_urls": [URL]}, "output_upload.complete_url", "Missing"),
        ({"part_urls": [], "complete_url": URL}, "output_upload.part_urls", "must not be empty"),
        ({"part_urls": [5], "complete_url": URL}, "output_upload.part_urls", "array of strings"),
        ({"part_urls": [URL], "complete_url": "s3://b/k"}, "output_upload", "https://"),
        ({"part_urls": ["https://10.0.0.1/"], "complete_url": URL}, "output_upload", "public"),
        ({"part_urls": [URL], "complete_url": f"{URL}&X-Amz-Date=20200101T000000Z&X-Amz-Expires=1"},
         "output_upload", "expired"),
        ([URL], "output_upload", "an object"),
    ],
)  # fmt: skip
async def test_what_is_no_upload_is_refused(
    api: Api, services: Services, upload: Any, param: str, words: str
) -> None:
    batch = await ended(services)
    answer = ask(api, batch.id, output_upload=upload)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert ask(api, batch.id, output_url=URL, output_upload=upload).status_code == 400


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "output_url", "missing_required_parameter"),
        ({"output_url": None}, "output_url", "missing_required_parameter"),
        ({"output_url": "http://example.com/"}, "output_url", "invalid_value"),
        ({"output_url": "s3://bucket/key"}, "output_url", "invalid_value"),
        ({"output_url": "/etc/passwd"}, "output_url", "invalid_value"),
        ({"output_url": "https://192.168.0.1/out"}, "output_url", "invalid_value"),
        ({"output_url": URL, "error_url": URL}, "error_url", "invalid_value"),
        ({"error_url": "https://bucket.example.com/a.parquet"}, "error_url", "invalid_value"),
        ({"output_url": 5}, "output_url", "invalid_type"),
        ({"error_url": URL}, "error_file_id", "no_such_result"),
        ({"output_url": URL, "tenant": "other"}, "tenant", "unknown_parameter"),
    ],
)
async def test_what_cannot_be_delivered_is_refused(
    api: Api, services: Services, body: dict[str, Any], param: str, code: str
) -> None:
    batch = await ended(services)
    answer = ask(api, batch.id, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert (await services.store.deliveries.page()) == []


async def test_a_url_that_has_expired_is_refused(api: Api, services: Services) -> None:
    batch = await ended(services)
    expired = f"{URL}&X-Amz-Date=20200101T000000Z&X-Amz-Expires=60"
    answer = ask(api, batch.id, output_url=expired)
    assert answer.status_code == 400
    assert "expired" in answer.json()["error"]["message"]
