"""``/livez``, ``/readyz`` and ``/metrics``, as a probe and a Prometheus meet them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from batchyard.api.operators import health
from tests.api.conftest import LINE, served
from tests.services.ports import free_port

if TYPE_CHECKING:
    from batchyard.settings import Settings
    from tests.api.conftest import Api

TOKEN = "of-the-scraper"


def get(api: Api, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{api.port}{path}", headers=headers, timeout=30)


def samples(page: str) -> dict[tuple[str, ...], float]:
    """By the name and the values of the labels in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_it_is_answered_without_a_key(api: Api, path: str) -> None:
    assert get(api, path).status_code == 200


def test_ready_names_the_parts(api: Api) -> None:
    assert get(api, "/readyz").json() == {
        "status": "ready",
        "database": "ok",
        "storage": "ok",
        "prefect": "not configured",
    }


def test_the_page_is_for_prometheus_and_has_the_version(api: Api) -> None:
    answer = get(api, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found[("batchyard_database_up",)] == 1
    assert any(name == "batchyard_build_info" for name, *_ in found)


def test_it_names_no_tenant_no_batch_and_no_model_that_was_never_served(api: Api) -> None:
    """What tenants write makes no series of its own: they could make any number of them."""
    client = api.openai()
    model = "a-secret-plan"
    line = json.dumps(json.loads(LINE) | {"body": {"model": model}}).encode()
    file = client.files.create(file=("in.jsonl", line), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    page = get(api, "/metrics").text
    for word in (model, batch.id, file.id, "tenant", api.key):
        assert word not in page


def test_a_token_is_asked_for_where_one_is_set(settings: Settings, keys: tuple[str, str]) -> None:
    closed = settings.model_copy(update={"metrics_token": SecretStr(TOKEN)})
    with served(closed, keys) as api:
        assert get(api, "/metrics").status_code == 401
        assert get(api, "/metrics", authorization="Bearer other").status_code == 401
        assert get(api, "/metrics", authorization=f"Bearer {api.key}").status_code == 401
        assert get(api, "/metrics", authorization=f"Bearer {TOKEN}").status_code == 200
        assert get(api, "/livez").status_code == 200


def test_without_a_database_it_lives_is_not_ready_and_says_so(
    settings: Settings, keys: tuple[str, str]
) -> None:
    with served(settings, keys) as api:
        (settings.home_folder / "batchyard.db").write_bytes(b"no database")
        assert get(api, "/livez").status_code == 200
        answer = get(api, "/readyz")
        assert answer.status_code == 503
        assert answer.json()["database"] == "unavailable"
        assert samples(get(api, "/metrics").text)[("batchyard_database_up",)] == 0


def test_without_its_storage_it_is_not_ready(
    settings: Settings, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is an S3 server that does not answer."""
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 0.5)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    with served(settings.model_copy(update={"storage": "s3://bucket/batches"}), keys) as api:
        answer = get(api, "/readyz")
        assert answer.status_code == 503
        assert answer.json() | {"database": "ok", "storage": "unavailable"} == answer.json()
