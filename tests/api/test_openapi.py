"""The API's own description: whole, right, and held against what the API answers."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
import runpy
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from batchyard import api as package
from batchyard.lifecycle import BatchStatus
from batchyard.page import docs
from batchyard.server import create_app
from tests.api.conftest import LINE, ROOT
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from batchyard.services.services import Services
    from tests.api.conftest import Api

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


DOCUMENT = create_app().openapi()

schema = schemathesis.openapi.from_dict(DOCUMENT)


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described_whatever_is_sent(case: schemathesis.Case, api: Api) -> None:
    """No defect (5xx), and no status, header, media type or key that the description lacks."""
    case.call_and_validate(
        base_url=api.url.removesuffix("/v1"),
        headers={"authorization": f"Bearer {api.key}"},
        checks=CHECKS,
        timeout=20,
    )


@pytest.mark.parametrize("status", list(BatchStatus))
async def test_a_batch_is_as_described_in_each_status(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one", metadata={"a": "b"})
    for path, method in (
        ("/v1/batches/{batch_id}", "GET"),
        ("/v1/batches/{batch_id}/cancel", "POST"),
        ("/v1/batches", "GET"),
    ):
        check(api, path, method, {"batch_id": batch.id})


@pytest.mark.parametrize("status", list(BatchStatus))
async def test_a_message_batch_is_as_described_in_each_status(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one", message_requests=10)
    one = "/v1/messages/batches/{message_batch_id}"
    for path, method in (
        (one, "GET"),
        ("/v1/messages/batches", "GET"),
        (f"{one}/results", "GET"),
        (f"{one}/cancel", "POST"),
        (one, "DELETE"),
    ):
        check(api, path, method, {"message_batch_id": f"msg{batch.id}"})


def test_files_and_uploads_that_are_there_are_as_described(api: Api) -> None:
    client = api.openai()
    file = client.files.create(file=LINE, purpose="batch")
    found = {"file_id": file.id}
    check(api, "/v1/files/{file_id}", "GET", found)
    check(api, "/v1/files", "GET", {})
    for wanted, status in ((None, 200), ("bytes=0-3", 206), ("bytes=9999-", 416)):
        headers = {"Range": wanted} if wanted else {}
        answer = check(api, "/v1/files/{file_id}/content", "GET", found, headers)
        assert answer.status_code == status
    check(api, "/v1/files/{file_id}", "DELETE", found)
    upload = client.uploads.create(
        bytes=len(LINE), filename="in.jsonl", mime_type="text/jsonl", purpose="batch"
    )
    part = client.uploads.parts.create(upload.id, data=LINE)
    for action, body in (("complete", {"part_ids": [part.id]}), ("cancel", {})):
        path = f"/v1/uploads/{{upload_id}}/{action}"
        check(api, path, "POST", {"upload_id": upload.id}, body=body)


async def test_webhooks_and_deliveries_that_are_there_are_as_described(
    api: Api, services: Services
) -> None:
    wanted = {"name": "n", "url": "https://example.com/", "event_types": ["batch.completed"]}
    created = check(api, "/v1/webhook_endpoints", "POST", {}, body=wanted)
    assert created.status_code == 200
    found = {"webhook_endpoint_id": created.json()["id"]}
    one = "/v1/webhook_endpoints/{webhook_endpoint_id}"
    for path, method, body in (
        ("/v1/webhook_endpoints", "GET", NOT_SET),
        (one, "GET", NOT_SET),
        (one, "POST", {"name": "other"}),
        (f"{one}/rotate_secret", "POST", {"keep_old_secret_active_for_24_hours": True}),
    ):
        assert check(api, path, method, found, body=body).status_code == 200
    await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
    listed = check(api, "/v1/deliveries", "GET", {})
    delivery = {"delivery_id": listed.json()["data"][0]["id"]}
    assert check(api, "/v1/deliveries/{delivery_id}", "GET", delivery).status_code == 200
    replayed = check(api, "/v1/deliveries/{delivery_id}/replay", "POST", delivery, body={})
    assert replayed.status_code == 409
    assert check(api, one, "DELETE", found).status_code == 200


def check(
    api: Api,
    path: str,
    method: str,
    ids: dict[str, str],
    headers: dict[str, str] | None = None,
    body: Any = NOT_SET,
) -> Any:
    """One call, which must be answered as described; the answer."""
    case = schema[path][method].Case(
        path_parameters=ids,
        body=body,
        media_type=None if body is NOT_SET else "application/json",
    )
    return case.call_and_validate(
        base_url=api.url.removesuffix("/v1"),
        headers={"authorization": f"Bearer {api.key}", **(headers or {})},
        checks=CHECKS,
    )


def api_modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def test_every_route_is_described() -> None:
    routes = [
        (f"/v1{route.path}".replace(":path}", "}"), method.lower())
        for module in api_modules()
        if hasattr(module, "router")
        for route in module.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    ]
    described = [
        (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
    ]
    assert sorted(described) == sorted(routes)


def test_each_operation_says_what_it_answers() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert answers["200"]["content"], (method, path)
            assert "x-request-id" in answers["200"]["headers"], (method, path)
            assert "422" not in answers, "FastAPI's own refusal, which is never sent"


def test_reading_it_needs_no_key(api: Api) -> None:
    with api.http() as client:
        client.headers.pop("authorization")
        root = api.url.removesuffix("/v1")
        assert client.get(f"{root}/openapi.json").json() == DOCUMENT
        assert "openapi.json" in client.get(f"{root}/docs").text


def test_its_page_loads_nothing_from_another_host(api: Api) -> None:
    root = api.url.removesuffix("/v1")
    with api.http() as client:
        client.headers.pop("authorization")
        shown = client.get(f"{root}/docs")
        assert shown.headers["content-security-policy"].startswith("default-src 'self'; ")
        links = re.findall(r"(?:src|href|data-url)=\"([^\"]*)\"", shown.text)
        assert len(links) >= 5
        for link in links:
            answer = client.get(f"{root}/{link}")
            assert answer.status_code == 200, link
            assert "//" not in link
        # No script in the page itself, which the policy would not run.
        assert re.findall(r"<script[^>]*>(.*?)</script>", shown.text, re.DOTALL) == ["", ""]
        for name in ("LICENSE", "..%2f__init__.py", "x"):
            assert client.get(f"{root}/docs/{name}").status_code == 404


def test_what_others_wrote_is_as_they_published_it() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in docs.FOLDER.iterdir()
        if path.name != "start.js"
    }
    assert found == docs.VENDORED


def test_the_document_in_docs_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("batchyard.server", run_name="__main__")
    kept = (ROOT / "docs" / "openapi.json").read_text()
    assert kept == capsys.readouterr().out, (
        "docs/openapi.json differs from what the API says of itself; write it again with: "
        ".venv/bin/python -m batchyard.server > docs/openapi.json"
    )
