"""As much of Prefect's server as the API speaks to, in a thread, with what it was asked."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SmallPrefect:
    """``models``: of the engine blocks that there are; ``live``: those of them that are.

    ``remote``: those whose blocks are of servers that run already. ``adapters``: by model.
    ``fields``: what else a model's block has. ``status``: of every answer.
    """

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.models: list[str] = []
        self.live: set[str] = set()
        self.remote: list[str] = []
        self.fields: dict[str, dict[str, Any]] = {}
        self.adapters: dict[str, list[str]] = {}
        self.asked: list[tuple[str, Any]] = []

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def wait_until(self, is_true: Callable[[SmallPrefect], bool]) -> None:
        deadline = time.monotonic() + PATIENCE * 10
        while not is_true(self):
            assert time.monotonic() < deadline, self.asked
            time.sleep(0.01)

    def answer(self, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        match path.removeprefix("/api/").split("/"):
            case ["deployments", "name", *_]:
                return {"id": "deployment", "work_pool_name": "control"}
            case ["deployments", _, "create_flow_run"]:
                return {"id": "run", "state": {"type": "SCHEDULED"}, "work_pool_name": "control"}
            case ["block_documents", "filter"]:
                wanted = {"any_": ["batchyard-vllm-engine", "batchyard-remote-engine"]}
                assert body["block_types"]["slug"] == wanted
                first = body["offset"]
                names = self.models[first : first + body["limit"]]
                return [self._document(name) for name in names]
        return []

    def _document(self, model: str) -> dict[str, Any]:
        kind = "batchyard-remote-engine" if model in self.remote else "batchyard-vllm-engine"
        adapters = self.adapters.get(model, [])
        data = {
            "model": model,
            "live": model in self.live,
            "adapters": adapters
            if model in self.remote
            else {name: f"/data/{name}" for name in adapters},
            **self.fields.get(model, {}),
        }
        return {"created": "2026-11-20T12:00:00.5Z", "data": data, "block_type": {"slug": kind}}


@contextmanager
def serving() -> Iterator[SmallPrefect]:
    prefect = SmallPrefect()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._send(prefect.answer(self.path, json.loads(self.rfile.read(length))))

        def do_GET(self) -> None:
            self._send(prefect.answer(self.path, None))

        def _send(self, value: Any) -> None:
            self.send_response(prefect.status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    prefect.url = f"http://127.0.0.1:{server.server_address[1]}/api"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield prefect
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
