"""A tenant's quota of stored bytes: what is refused, what counts, and what is stored anyway."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.store import Quota
from tests.api.conftest import LINE, receive_until
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from tests.api.conftest import Api

SIZE = len(LINE)
PART = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "text/jsonl"}


@pytest.fixture(autouse=True)
async def two_lines(services: Services) -> None:
    """The tenant ``one`` may store two lines; ``other`` has no limit."""
    await services.store.tenants.set_quota("one", Quota(max_stored_bytes=2 * SIZE))


def upload(api: Api, content: bytes = LINE, key: str | None = None) -> Any:
    return api.openai(key, max_retries=0).files.create(file=("in.jsonl", content), purpose="batch")


def refused(call: Any, *values: Any, **named: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as raised:
        call(*values, **named)
    error = raised.value
    assert (error.status_code, error.type, error.param, error.code) == (
        413,
        "invalid_request_error",
        "file",
        "storage_limit_exceeded",
    )
    return error


def test_what_just_fits_is_stored_and_more_is_refused_and_leaves_nothing(api: Api) -> None:
    upload(api, LINE + LINE)
    error = refused(upload, api)
    assert f"may have {2 * SIZE:,} stored bytes; it has {2 * SIZE:,}" in error.message
    assert "Delete files and responses that you no longer need" in error.message
    assert len(api.objects()) == 1


def test_a_tenant_that_is_full_keeps_no_other_from_storing(api: Api) -> None:
    upload(api, LINE + LINE)
    assert upload(api, LINE * 3, api.other_key).bytes == 3 * SIZE


def test_a_deleted_file_makes_room(api: Api) -> None:
    file = upload(api, LINE + LINE)
    api.openai().files.delete(file.id)
    assert upload(api).bytes == SIZE


def test_a_body_that_announces_too_much_is_refused_before_it_is_sent(api: Api) -> None:
    announced = 2 * SIZE + 64 * 1024 + 1
    answer = api.raw(
        api.head(
            "POST",
            "/files",
            "Content-Type: multipart/form-data; boundary=x",
            f"Content-Length: {announced}",
        )
    )
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"storage_limit_exceeded" in answer


CHUNKED = (
    "Content-Type: multipart/form-data; boundary=x",
    "Transfer-Encoding: chunked",
)


def begin_sending(api: Api, path: str, field: str, size_bytes: int) -> socket.socket:
    """Send so many bytes of a body that announces no length, and leave it unfinished."""
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE * 10)
    form = f'--x\r\nContent-Disposition: form-data; name="{field}"; filename="a"\r\n\r\n'
    chunk = form.encode() + b" " * size_bytes
    connection.sendall(api.head("POST", path, *CHUNKED) + b"%x\r\n%s\r\n" % (len(chunk), chunk))
    return connection


def wait_for_refusal(connection: socket.socket) -> None:
    receive_until(connection, b"storage_limit_exceeded")


async def test_bodies_that_do_not_end_cannot_have_more_than_the_quota_together(
    api: Api, services: Services
) -> None:
    """A tenant could fill everybody's disk with them, and keep it full."""
    await services.store.tenants.set_quota("one", Quota(max_stored_bytes=500_000))
    with begin_sending(api, "/files", "file", 400_000):
        api.wait_for_objects(1)
        with begin_sending(api, "/files", "file", 400_000) as second:
            wait_for_refusal(second)
    api.wait_for_objects(0)
    # What was broken off counts no more.
    assert upload(api, LINE * 3000).bytes == 3000 * SIZE


async def test_a_part_that_does_not_end_cannot_have_more_than_the_quota(
    api: Api, services: Services
) -> None:
    await services.store.tenants.set_quota("one", Quota(max_stored_bytes=500_000))
    uploads = api.openai(max_retries=0).uploads
    begun = uploads.create(**PART, bytes=300_000)  # type: ignore[arg-type]
    with begin_sending(api, f"/uploads/{begun.id}/parts", "data", 2_000_000) as sending:
        wait_for_refusal(sending)
    assert uploads.parts.create(begun.id, data=b" " * 300_000).upload_id == begun.id


def test_an_upload_in_parts_counts_from_its_announcement_until_it_is_cancelled(api: Api) -> None:
    uploads = api.openai(max_retries=0).uploads
    begun = uploads.create(**PART, bytes=2 * SIZE)  # type: ignore[arg-type]
    refused(upload, api)
    refused(uploads.create, **PART, bytes=1)
    uploads.cancel(begun.id)
    assert upload(api).bytes == SIZE


def test_an_upload_that_was_begun_is_completed_though_it_fills_the_quota(api: Api) -> None:
    uploads = api.openai(max_retries=0).uploads
    begun = uploads.create(**PART, bytes=2 * SIZE)  # type: ignore[arg-type]
    parts = [uploads.parts.create(begun.id, data=LINE).id for _ in range(2)]
    assert uploads.complete(begun.id, part_ids=parts).status == "completed"
    refused(upload, api)


def test_parts_with_more_bytes_than_were_announced_count_as_well(api: Api) -> None:
    """Otherwise the upload of one byte could have a disk full of parts."""
    uploads = api.openai(max_retries=0).uploads
    begun = uploads.create(**PART, bytes=SIZE)  # type: ignore[arg-type]
    # One may be sent twice, as SDKs do after a time-out.
    for _ in range(2):
        uploads.parts.create(begun.id, data=LINE)
    refused(uploads.parts.create, begun.id, data=LINE)
    assert len(api.objects()) == 2


def test_lines_in_a_request_are_refused_and_leave_nothing(api: Api) -> None:
    upload(api, LINE + LINE)
    asked = {
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "requests": [{"custom_id": "a", "body": {"model": "m"}}],
    }
    with api.http() as http:
        answer = http.post("/batches", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "storage_limit_exceeded")
    assert len(api.objects()) == 1


async def test_the_bytes_of_a_file_count_until_they_are_deleted(
    api: Api, services: Services
) -> None:
    file = upload(api, LINE + LINE)
    assert (await services.store.tenants.usage("one")).stored_bytes == 2 * SIZE
    await services.store.files.delete(file.id)
    assert (await services.store.tenants.usage("one")).stored_bytes == 0
