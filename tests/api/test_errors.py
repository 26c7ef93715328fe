"""Every failure has the one envelope, a request id, and makes the SDK raise the right class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.api.http.errors import as_api_error
from batchyard.errors import (
    AccessDenied,
    BatchLimitExceeded,
    DispatchFailed,
    ObjectTooLarge,
    OtherTables,
    QuotaExceeded,
    RequestRefused,
    StorageFull,
    StorageUnavailable,
    StoreError,
    StoreUnavailable,
    TransitionConflict,
)

if TYPE_CHECKING:
    from batchyard.errors import BatchyardError
    from tests.api.conftest import Api

KEYS = ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/files/", 404),
        ("GET", "/files/a/b/c", 404),
        ("PUT", "/files", 405),
        ("GET", "/uploads", 405),
        ("GET", "/files/file-x", 404),
        ("GET", "/files/%00", 400),
        ("GET", "/files?after=%00", 400),
        ("GET", "/organization/usage/completions?start_time=1&models=%00&models=m", 400),
        ("GET", "/files?limit=x", 400),
        ("POST", "/files", 415),
        ("POST", "/uploads", 400),
        ("GET", "/openapi.json", 404),
    ],
)
def test_every_refusal_is_the_envelope_with_a_request_id(
    api: Api, method: str, path: str, status: int
) -> None:
    with api.http() as http:
        answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert list(answer.json()) == ["error"]
    assert list(answer.json()["error"]) == KEYS


def test_a_path_outside_of_v1_is_the_envelope_too(api: Api) -> None:
    with api.http() as http:
        answer = http.get(f"http://127.0.0.1:{api.port}/nothing")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])


def test_a_405_says_what_is_allowed(api: Api) -> None:
    with api.http() as http:
        assert http.put("/uploads").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Basic eDp5", None),
        ("Bearer sk-by-wrong", "invalid_api_key"),
        ("Bearer My API Key", "invalid_api_key"),
        ("bearer na\u00efve", "invalid_api_key"),
    ],
)
def test_without_a_known_key_every_route_is_a_401(
    api: Api, header: str | None, code: str | None
) -> None:
    with api.http() as http:
        del http.headers["authorization"]
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (("GET", "/files"), ("POST", "/files"), ("POST", "/uploads")):
            answer = http.request(method, path, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == 401
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                None,
                code,
            )
            assert "wrong" not in error["message"]


async def test_the_sdk_raises_the_class_that_belongs_to_the_status(api: Api) -> None:
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        api.openai("sk-by-wrong").files.list()
    assert wrong_key.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown:
        api.openai().files.retrieve("file-x")
    assert unknown.value.param == "id"
    assert unknown.value.message.endswith("'No such File object: file-x'") or (
        "No such File object: file-x" in unknown.value.message
    )
    with pytest.raises(openai.APIStatusError) as too_large:
        api.openai().files.create(file=b"{}\n" * 1_000_000, purpose="batch")
    assert (too_large.value.status_code, too_large.value.param) == (413, "file")
    async with api.async_openai() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.files.create(file=b"{}", purpose="nothing")  # type: ignore[arg-type]
    assert bad.value.param == "purpose"


def test_the_request_id_is_shown_by_the_sdk(api: Api) -> None:
    client = api.openai()
    answer = client.files.with_raw_response.list()
    assert answer.headers["x-request-id"] == answer.request_id
    assert client.files.create(file=b"{}", purpose="batch")._request_id is not None
    with pytest.raises(openai.NotFoundError) as raised:
        client.files.retrieve("file-x")
    assert str(raised.value.request_id).startswith("req_")
    assert client.files.with_raw_response.list().request_id != answer.request_id


def test_a_defect_of_ours_is_a_500_that_tells_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr("batchyard.store.file.files.Files.page", broken)
    with api.http() as http:
        answer = http.get("/files")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestRefused("x", param="a", code="b"), 400, "b"),
        (QuotaExceeded("x"), 429, "rate_limit_exceeded"),
        (BatchLimitExceeded("x"), 429, "rate_limit_exceeded"),
        (TransitionConflict("x"), 409, None),
        (ObjectTooLarge("x"), 413, "file_too_large"),
        (StoreUnavailable("host db.internal"), 503, "store_unavailable"),
        (StorageUnavailable("host s3.internal"), 503, "storage_unavailable"),
        (DispatchFailed("http://prefect.internal"), 503, "dispatch_failed"),
        (StorageFull("/srv/objects"), 503, "storage_full"),
        (AccessDenied("/srv/objects"), 503, "access_denied"),
        (OtherTables("no such column"), 503, "store_unavailable"),
        (StoreError("select"), 500, None),
    ],
)
def test_each_exception_of_ours_has_its_answer(
    error: BatchyardError, status: int, code: str | None
) -> None:
    answer = as_api_error(error)
    headers = answer.to_response().headers
    assert (answer.status, answer.code) == (status, code)
    assert ("retry-after" in headers) == (status in {429, 503})
    assert int(headers.get("retry-after", "0")) <= 60
    assert (headers.get("x-should-retry") == "false") == (status == 409)
    if status >= 500:
        assert str(error) not in answer.message
