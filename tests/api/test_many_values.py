"""Bodies of many small values, which need far more memory than their text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.body import MAX_JSON_BYTES, parse_large_object
from batchyard.store import Quota

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from tests.api.conftest import Api

EMPTY = b'{"model": "m", "input": [%b], "messages": [], "background": %b}'


@pytest.fixture
async def live_allowed(services: Services) -> None:
    await services.store.tenants.set_quota("one", Quota(max_live_requests=1))


@pytest.mark.parametrize("path", ["/responses", "/chat/completions"])
@pytest.mark.parametrize("background", [b"false", b"true"])
def test_a_body_of_empty_arrays_is_refused_before_it_is_parsed(
    live_allowed: None, api: Api, path: str, background: bytes
) -> None:
    with api.http() as http:
        answer = http.post(path, content=EMPTY % (b"[]," * 500_000 + b"[]", background))
    assert answer.status_code == 413
    assert "400000 objects, arrays and keys" in answer.json()["error"]["message"]


@pytest.mark.parametrize("values", ['"a"', "1"])
def test_a_body_has_a_limit_of_values_of_any_kind(values: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_large_object(b'{"a": [%b]}' % b",".join([values.encode()] * 1_200_002))
    assert refused.value.status == 413


def test_a_prompt_of_a_million_tokens_is_taken() -> None:
    prompt = [n % 150_000 for n in range(1_000_000)]
    data = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert len(data) > MAX_JSON_BYTES
    assert parse_large_object(data)["prompt"] == prompt
