"""Batches through the official client: what is asked, what is refused, what a batch looks like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.wire import Batch
from tests.api.conftest import LINE
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api

KEYS = [
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
]
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
WANTED: dict[str, Any] = {
    "input_file_id": "file-none",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
}
SIGNED_LONG_AGO = (
    "https://bucket.example.com/x?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20200101T000000Z"
    "&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=ab"
)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input_file_id": ...}, "input_file_id", "missing_required_parameter"),
    ({"input_file_id": None}, "input_file_id", "missing_required_parameter"),
    ({"input_file_id": 7}, "input_file_id", "invalid_type"),
    ({"input_file_id": ""}, "input_file_id", "empty_string"),
    ({"input_file_id": "x" * 257}, "input_file_id", "string_above_max_length"),
    (dict.fromkeys(WANTED, ...), "input_file_id", "missing_required_parameter"),
    ({"endpoint": ...}, "endpoint", "missing_required_parameter"),
    ({"endpoint": "/v1/nothing"}, "endpoint", "invalid_value"),
    ({"endpoint": ["/v1/completions"]}, "endpoint", "invalid_type"),
    ({"completion_window": ...}, "completion_window", "missing_required_parameter"),
    ({"completion_window": "soon"}, "completion_window", "invalid_value"),
    ({"completion_window": "0h"}, "completion_window", "invalid_value"),
    ({"completion_window": "Background"}, "completion_window", "invalid_value"),
    ({"completion_window": ""}, "completion_window", "invalid_value"),
    ({"completion_window": 24}, "completion_window", "invalid_type"),
    ({"metadata": "text"}, "metadata", "invalid_type"),
    ({"metadata": {"n": 7}}, "metadata.n", "invalid_type"),
    ({"metadata": {"n": None}}, "metadata.n", "invalid_type"),
    (
        {"metadata": {str(n): "" for n in range(17)}},
        "metadata",
        "object_above_max_properties",
    ),
    ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 64, "string_above_max_length"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length"),
    (
        {"output_expires_after": {"seconds": 3600}},
        "output_expires_after.anchor",
        "missing_required_parameter",
    ),
    (
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
        "output_expires_after.anchor",
        "invalid_value",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
        "output_expires_after.seconds",
        "integer_below_min_value",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
        "output_expires_after.seconds",
        "integer_above_max_value",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": "3600"}},
        "output_expires_after.seconds",
        "invalid_type",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 3600, "x": 1}},
        "output_expires_after.x",
        "unknown_parameter",
    ),
    ({"window": "24h"}, "window", "unknown_parameter"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"priority": 10**9}, "priority", "invalid_value"),
    ({"notify_email": "a@example.com, b@example.com"}, "notify_email", "invalid_value"),
    ({"notify_email": "a@example.com\r\nBcc: b@example.com"}, "notify_email", "invalid_value"),
    ({"notify_email": "nobody"}, "notify_email", "invalid_value"),
    ({"input_url": "https://example.com/in"}, "input_url", "invalid_value"),
    ({"requests": [{}]}, "requests", "invalid_value"),
    ({"on_invalid": "skip"}, "on_invalid", "invalid_value"),
    ({"on_invalid": True}, "on_invalid", "invalid_type"),
    ({"on_invalid_output": ["length"]}, "on_invalid_output", "invalid_type"),
    ({"on_invalid_output": {"attempts": 2}}, "on_invalid_output", "invalid_value"),
    (
        {"on_invalid_output": {"finish_reason": ["length"]}},
        "on_invalid_output.finish_reason",
        "unknown_parameter",
    ),
    (
        {"on_invalid_output": {"finish_reasons": ["length"], "set": {"chat_template": "x"}}},
        "on_invalid_output",
        "unsupported_parameter",
    ),
    ({"input_file_ids": ["a", "b"]}, "input_file_ids", "invalid_value"),
    ({"input_file_id": ..., "input_file_ids": []}, "input_file_ids", "empty_array"),
    ({"input_file_id": ..., "input_file_ids": "a"}, "input_file_ids", "invalid_type"),
    ({"input_file_id": ..., "input_file_ids": ["a", 7]}, "input_file_ids", "invalid_type"),
    ({"input_file_id": ..., "input_file_ids": ["a", ""]}, "input_file_ids", "empty_string"),
    (
        {"input_file_id": ..., "input_file_ids": ["a", "x" * 257]},
        "input_file_ids",
        "string_above_max_length",
    ),
    (
        {"output_upload": {"part_urls": ["https://a/" + "x" * 8192], "complete_url": "https://a/"}},
        "output_upload.part_urls",
        "string_above_max_length",
    ),
    (
        {"input_file_id": ..., "input_file_ids": ["a"] * 101},
        "input_file_ids",
        "array_above_max_length",
    ),
    ({"input_file_id": ..., "requests": []}, "requests", "empty_array"),
    ({"input_file_id": ..., "requests": {"a": {}}}, "requests", "invalid_type"),
    ({"input_file_id": ..., "requests": [{}, "x"]}, "requests", "invalid_type"),
    ({"input_file_id": ..., "requests": None}, "input_file_id", "missing_required_parameter"),
    (
        {"input_file_id": ..., "requests": [{}] * 50_001},
        "requests",
        "array_above_max_length",
    ),
    (
        {"input_file_id": ..., "input_url": "https://example.com/x", "requests": [{}]},
        "requests",
        "invalid_value",
    ),
    (
        {"input_file_id": ..., "input_url": SIGNED_LONG_AGO},
        "input_url",
        "invalid_value",
    ),
    ({"output_url": SIGNED_LONG_AGO}, "output_url", "invalid_value"),
    ({"error_url": "https://user:secret@example.com/"}, "error_url", "invalid_value"),
    ({"webhook_url": "http://example.com/"}, "webhook_url", "invalid_value"),
    ({"webhook_url": "s3://bucket/key"}, "webhook_url", "invalid_value"),
    ({"webhook_url": "https://user:secret@example.com/"}, "webhook_url", "invalid_value"),
    (
        {"output_url": "https://example.com/" + "x" * 8192},
        "output_url",
        "string_above_max_length",
    ),
    (
        {"output_url": "https://example.com/x", "error_url": "https://example.com/x"},
        "error_url",
        "invalid_value",
    ),
    (
        {
            "input_file_id": ...,
            "input_url": "https://example.com/x",
            "output_url": "https://example.com/x",
        },
        "output_url",
        "invalid_value",
    ),
]


def strict(api: Api, **options: Any) -> openai.OpenAI:
    return api.openai(_strict_response_validation=True, **options)


def create(client: openai.OpenAI, **changes: Any) -> Any:
    return client.batches.create(**{**WANTED, **changes})


def post(api: Api, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Create with plain HTTP; keys that change to ... are left out. Status and body."""
    body = {key: value for key, value in {**WANTED, **changes}.items() if value is not ...}
    with api.http() as client:
        answer = client.post("/batches", json=body)
    return answer.status_code, answer.json()


# -- the object ---------------------------------------------------------------------------------


def test_a_new_batch_has_all_22_keys_in_their_order(api: Api) -> None:
    status, batch = post(api, metadata={"a": "b"})
    assert status == 200
    assert list(batch) == KEYS
    assert batch == {
        **dict.fromkeys(KEYS),
        **WANTED,
        "id": batch["id"],
        "object": "batch",
        "status": "validating",
        "created_at": batch["created_at"],
        "expires_at": batch["created_at"] + 86_400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": NO_USAGE,
        "metadata": {"a": "b"},
    }
    assert re.fullmatch("batch_[0-9a-f]{32}", batch["id"])


@pytest.mark.parametrize("status", list(BatchStatus))
async def test_the_object_is_whole_in_each_status(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one")
    with api.http() as client:
        shown = client.get(f"/batches/{batch.id}").json()
    assert list(shown) == KEYS
    assert shown["status"] == status.value
    assert strict(api).batches.retrieve(batch.id).status == status.value
    entered = {f"{status.value}_at"} if status is not BatchStatus.VALIDATING else set()
    assert all(isinstance(shown[name], int) for name in entered)


def test_what_was_asked_is_echoed(api: Api) -> None:
    batch = create(
        strict(api),
        completion_window="90m",
        metadata={"ключ": "значение", "empty": ""},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.completion_window == "90m"
    assert batch.expires_at == batch.created_at + 90 * 60
    assert batch.metadata == {"ключ": "значение", "empty": ""}
    assert strict(api).batches.retrieve(batch.id) == batch


def test_a_background_batch_has_a_window_and_an_end_as_any_other(api: Api) -> None:
    """For OpenAI's types the end is a number, so that clients which count down to it go on."""
    batch = create(strict(api), completion_window="background")
    assert batch.completion_window == "background"
    assert batch.expires_at == batch.created_at + 30 * 86_400
    assert strict(api).batches.retrieve(batch.id) == batch


def test_metadata_that_is_null_stays_null(api: Api) -> None:
    assert create(strict(api), metadata=None).metadata is None


async def test_the_async_client_does_it_all(api: Api) -> None:
    async with api.async_openai(_strict_response_validation=True) as client:
        file = await client.files.create(file=LINE, purpose="batch")
        batch = await client.batches.create(**{**WANTED, "input_file_id": file.id})
        assert (await client.batches.retrieve(batch.id)).input_file_id == file.id
        assert [each.id async for each in await client.batches.list()] == [batch.id]
        assert (await client.batches.cancel(batch.id)).status == "cancelling"


def test_each_answer_names_its_request(api: Api) -> None:
    raw = strict(api).batches.with_raw_response.create(**WANTED)
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with pytest.raises(openai.NotFoundError) as caught:
        api.openai().batches.retrieve("batch_none")
    assert (caught.value.request_id or "").startswith("req_")


# -- what is refused ----------------------------------------------------------------------------


def test_a_create_that_cannot_be_names_what_is_wrong(api: Api) -> None:
    for changes, param, code in REFUSED:
        status, body = post(api, **changes)
        error = body["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), changes
        assert error["type"] == "invalid_request_error"
        assert "Signature" not in error["message"]
        assert "secret" not in error["message"]
    assert api.openai().batches.list().data == []


def test_no_client_names_a_place_of_the_server_itself(api: Api) -> None:
    places = ["/etc/passwd", "file:///etc/passwd", "s3://bucket/key", "hf://datasets/a/b/c", ""]
    for key in ("input_url", "output_url", "error_url", "webhook_url"):
        changes = {"input_file_id": ...} if key == "input_url" else {}
        for place in places:
            status, body = post(api, **changes, **{key: place})
            assert (status, body["error"]["param"]) == (400, key), place


def test_an_endpoint_that_is_not_served_is_answered_with_those_that_are(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions") as caught:
        create(api.openai(), endpoint="/v1/nothing")
    assert (caught.value.param, caught.value.code) == ("endpoint", "invalid_value")


def test_a_body_that_is_no_json_object_is_refused(api: Api) -> None:
    with api.http() as client:
        for body in (b"", b"{", b"[]", b'"text"', b'{"a": \xff}', b"[" * 5000):
            answer = client.post("/batches", content=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, None, None), body


# -- limits -------------------------------------------------------------------------------------


@pytest.fixture
def limited(settings: Settings) -> Callable[..., None]:
    """Change the quota before the server starts: to be asked for ahead of ``api``."""

    def limit(**quota: int) -> None:
        settings.quota = settings.quota.model_copy(update=quota)

    return limit


@pytest.fixture
def two_an_hour(limited: Callable[..., None]) -> None:
    limited(batches_per_hour=2)


@pytest.fixture
def one_active(limited: Callable[..., None]) -> None:
    limited(active_batches=1)


def test_a_tenant_that_creates_too_fast_is_slowed_down(two_an_hour: None, api: Api) -> None:
    client = api.openai(max_retries=0)
    create(client)
    create(client)
    with pytest.raises(openai.RateLimitError, match="2 batches an hour") as caught:
        create(client)
    assert (caught.value.code, caught.value.param) == ("rate_limit_exceeded", None)
    assert caught.value.type == "requests"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    create(api.openai(api.other_key))


def test_what_was_accepted_is_answered_again_whatever_the_pace(two_an_hour: None, api: Api) -> None:
    client = api.openai(max_retries=0)
    key = {"Idempotency-Key": "k"}
    first = create(client, extra_headers=key)
    create(client)
    assert create(client, extra_headers=key).id == first.id


def test_a_tenant_at_its_quota_is_told_to_wait(one_active: None, api: Api) -> None:
    client = api.openai(max_retries=0)
    create(client)
    with pytest.raises(openai.RateLimitError, match="1 active batches") as caught:
        create(client)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) <= 60


# -- whose batches ------------------------------------------------------------------------------


def test_others_batches_look_unknown_on_every_route(api: Api) -> None:
    batch = create(api.openai())
    stranger = api.openai(api.other_key)
    for call in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="No batch found") as caught:
            call(batch.id)
        assert caught.value.type == "invalid_request_error"
    assert stranger.batches.list().data == []
    with pytest.raises(openai.BadRequestError) as refused:
        stranger.batches.list(after=batch.id)
    assert refused.value.param == "after"
    assert api.openai().batches.retrieve(batch.id).status == "validating"


def test_the_same_idempotency_key_of_another_tenant_is_another_one(api: Api) -> None:
    key = {"Idempotency-Key": "k"}
    mine = create(api.openai(), extra_headers=key)
    theirs = create(api.openai(api.other_key), extra_headers=key, metadata={"a": "b"})
    assert mine.id != theirs.id


def test_no_route_works_without_a_key(api: Api) -> None:
    routes = [
        ("GET", "/batches"),
        ("POST", "/batches"),
        ("GET", "/batches/batch_x"),
        ("POST", "/batches/batch_x/cancel"),
        ("GET", "/models"),
        ("GET", "/models/m"),
    ]
    with api.http("wrong") as client:
        for method, path in routes:
            assert client.request(method, path).status_code == 401, (method, path)


def test_the_shape_is_that_of_the_wire() -> None:
    """What OpenAI does not have comes last, and only if there is something to say."""
    assert list(Batch.__struct_fields__) == [*KEYS, "warnings", "limited_by", "batch_invariant"]
