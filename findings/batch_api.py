"""OpenAI's Batch API on a free port of 127.0.0.1, for the scripts beside it: one batch of three.

``serve("completed")``: the first and the third line are answered, the second one was refused by the
model's server. ``serve("expired")`` and ``serve("cancelled")``: only the first line is answered.
The files have the shapes that OpenAI documents. The standard library only.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

_NEVER = {"batch_expired": "before the completion window expired", "batch_cancelled": "in time"}


def serve(status: str) -> str:
    """The base URL of a server whose batch has this status."""
    handler = type("Handler", (_Handler,), {"status": status, "ids": ["0", "1", "2"]})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
    status: str
    ids: list[str]
    """The custom ids of the last file that was uploaded."""

    def log_message(self, *_: Any) -> None:
        """Requests are not the finding."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        if not self.path.endswith("/files"):
            return self.do_GET()
        type(self).ids = [
            json.loads(line)["custom_id"] for line in body.splitlines() if line.startswith('{"')
        ]
        names = {"id": "file-in", "object": "file", "filename": "in.jsonl", "purpose": "batch"}
        return self._answer(json.dumps({**names, "bytes": 1, "created_at": 1}))

    def do_GET(self) -> None:
        first, second, third = self.ids
        is_completed = self.status == "completed"
        if "file-out" in self.path:
            answered = [first, third] if is_completed else [first]
            return self._answer("".join(map(_answered, answered)))
        if "file-err" in self.path:
            code = f"batch_{self.status}"
            ended = _refused(second) if is_completed else _never(second, code) + _never(third, code)
            return self._answer(ended)
        return self._answer(json.dumps(self._batch(2 if is_completed else 1)))

    def _batch(self, answered: int) -> dict[str, Any]:
        return {
            "id": "batch_1",
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-in",
            "output_file_id": "file-out",
            "metadata": None,
            "error_file_id": "file-err",
            "errors": None,
            "completion_window": "24h",
            "status": self.status,
            "created_at": 1,
            "request_counts": {"total": 3, "completed": answered, "failed": 3 - answered},
        }

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def _answered(custom_id: str) -> str:
    message = {"role": "assistant", "content": f"answer to {custom_id}"}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    return _line(custom_id, {"status_code": 200, "request_id": "r", "body": body}, None)


def _refused(custom_id: str) -> str:
    error = {
        "message": "too long",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
    }
    body = {"error": error}
    return _line(custom_id, {"status_code": 400, "request_id": "r", "body": body}, None)


def _never(custom_id: str, code: str) -> str:
    message = f"This request could not be executed {_NEVER[code]}."
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: Any, error: Any) -> str:
    ids = {"id": f"batch_req_{custom_id}", "custom_id": custom_id}
    return json.dumps({**ids, "response": response, "error": error}) + "\n"
