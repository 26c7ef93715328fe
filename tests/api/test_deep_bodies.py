"""JSON of any depth, wherever a client may send it: it is refused, and nothing breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.lines.json_depth import MAX_DEPTH

if TYPE_CHECKING:
    from tests.api.conftest import Api

LINES: Final = b'{"endpoint": "/v1/completions", "completion_window": "24h", %b}'
BATCH: Final = LINES % b'"input_file_id": "x", %b'
ROUTES: Final = {
    "/batches": (
        BATCH % b'"metadata": {"a": %b}',
        BATCH % b'"on_invalid_output": {"invalid_json": true, "set": {"a": %b}}',
        LINES % b'"requests": [{"a": 1}], "metadata": {"a": %b}',
        LINES % b'"requests": [{"a": %b}]',
    ),
    "/batches/batch_x/retry": (b'{"set": {"a": %b}}',),
    "/batches/batch_x/cancel": (b'{"a": %b}',),
    "/responses": (
        b'{"model": "m", "background": true, "input": %b}',
        b'{"model": "m", "input": %b}',
    ),
    "/chat/completions": (b'{"model": "m", "messages": %b}',),
    "/uploads": (b'{"filename": "a", "purpose": "batch", "expires_after": %b}',),
    "/webhook_endpoints": (b'{"name": "a", "url": "https://x.example", "event_types": %b}',),
}
DEPTHS: Final = (100, 500, 900, *range(930, 1000, 7), 5000)


def nested(depth: int) -> tuple[bytes, bytes]:
    return b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth


def test_no_depth_makes_a_route_fail(api: Api) -> None:
    with api.http() as http:
        for path, bodies in ROUTES.items():
            for body in bodies:
                for value in [each for depth in DEPTHS for each in nested(depth)]:
                    headers = {"idempotency-key": str(len(value))}
                    status = http.post(path, content=body % value, headers=headers).status_code
                    assert status < 500 or status == 503, (path, body, len(value))
        assert http.get("/batches").status_code == 200


def test_as_deep_as_a_line_and_no_deeper(api: Api) -> None:
    body = BATCH % b'"on_invalid_output": {"invalid_json": true, "set": {"a": %b}}'
    with api.http() as http:
        most = http.post("/batches", content=body % nested(MAX_DEPTH - 3)[0])
        assert most.status_code == 200
        assert http.get(f"/batches/{most.json()['id']}").status_code == 200
        refused = http.post("/batches", content=body % nested(MAX_DEPTH - 2)[0])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "The body is nested deeper than 64 levels."
