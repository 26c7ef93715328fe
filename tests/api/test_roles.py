"""What a key allows: read-only keys, operators' keys, keys that end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
from fastapi.routing import iter_route_contexts

from batchyard.api.http.auth import READING
from batchyard.server import create_app
from tests.api.conftest import LINE

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api

REFUSAL = "You have insufficient permissions for this operation: this API key is read-only."
BROWSERS = {"/login", "/logout"}
"""What a session is opened and ended with, whatever its key allows."""


def writing_routes(settings: Settings) -> list[tuple[str, str]]:
    """Each method and path with which something could be changed."""
    return sorted(
        (method, route.path_format.format_map(_Any()))
        for route in iter_route_contexts(create_app(settings).routes)
        if route.path not in BROWSERS
        for method in (route.methods or set()) - READING
    )


class _Any(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "x"


async def test_a_read_only_key_is_refused_by_every_route_that_writes(
    api: Api, services: Services
) -> None:
    """Also by routes that are added later: they are those of the application."""
    key = await services.store.api_keys.create("one", "ro", may_write=False)
    token = await services.store.sessions.open(key.record.id)
    routes = writing_routes(api.settings)
    assert len(routes) > 12
    with api.http(key.secret, cookies={"batchyard_session": token}) as client:
        for method, path in routes:
            answer = client.request(method, f"http://127.0.0.1:{api.port}{path}", json={})
            assert answer.status_code == 403, (method, path, answer.text)
            if not path.startswith("/v1/"):  # the page says it to people
                assert REFUSAL in answer.text, (method, path)
                continue
            if path.startswith("/v1/messages"):
                error = {"type": "permission_error", "message": REFUSAL}
                assert answer.json()["error"] == error
                continue
            assert answer.json()["error"] == {
                "message": REFUSAL,
                "type": "invalid_request_error",
                "param": None,
                "code": "insufficient_permissions",
            }


async def test_a_read_only_key_reads(api: Api, services: Services) -> None:
    file = api.openai().files.create(file=LINE, purpose="batch")
    key = (await services.store.api_keys.create("one", "ro", may_write=False)).secret
    client = api.openai(key)
    assert client.files.content(file.id).read() == LINE
    assert client.batches.list().data == []
    with pytest.raises(openai.PermissionDeniedError, match="read-only"):
        client.files.delete(file.id)


async def test_a_key_past_its_end_is_refused_and_says_since_when(
    api: Api, services: Services
) -> None:
    key = (await services.store.api_keys.create("one", "x", expires_at=1_700_000_000)).secret
    with pytest.raises(openai.AuthenticationError) as caught:
        api.openai(key).batches.list()
    assert caught.value.body == {
        "message": "The API key expired on 2023-11-14 at 22:13 UTC. Ask your operator for a "
        "new one.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


async def test_what_an_operators_key_does_is_in_the_audit_log(api: Api, services: Services) -> None:
    boss = await services.store.api_keys.create("one", "x", is_operator=True)
    for key in (boss.secret, api.key):
        client = api.openai(key)
        file = client.files.create(file=LINE, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        client.batches.cancel(batch.id)
    found = await services.store.audit.newest(limit=10)
    assert [(each.actor, each.action) for each in found] == [(boss.record.id, "batch.cancelled")]


async def test_openais_routes_show_an_operators_key_its_own_tenant(
    api: Api, services: Services
) -> None:
    """A client of OpenAI's must not list, change or delete what is another tenant's by mistake."""
    file = api.openai().files.create(file=LINE, purpose="batch")
    key = (await services.store.api_keys.create("boss", "x", is_operator=True)).secret
    client = api.openai(key)
    assert client.files.list().data == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    own = client.files.create(file=LINE, purpose="batch")
    assert [each.id for each in client.files.list().data] == [own.id]
