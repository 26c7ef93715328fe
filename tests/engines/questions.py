"""What a server is asked, so that its answers can be kept and played back.

``python -m tests.engines.questions NAME VERSION URL MODEL chat|embed`` asks a running server and
writes ``tests/engines/recorded/NAME.json``.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).parent / "recorded"
LOOKS: Final = (
    "/v1/models",
    "/models",
    "/version",
    "/openapi.json",
    "/metrics",
    "/server_info",
    "/get_server_info",
    "/props",
    "/info",
)
_HELLO: Final = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
_LONG: Final = "word " * 9000
_SCHEMA: Final = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}},
}
_CHAT: Final = "/v1/chat/completions"
_EMBED: Final = "/v1/embeddings"
CHATS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (_CHAT, _HELLO),
    "two choices": (_CHAT, {**_HELLO, "n": 2}),
    "logprobs": (_CHAT, {**_HELLO, "logprobs": True, "top_logprobs": 2}),
    "response_format": (_CHAT, {**_HELLO, "response_format": _SCHEMA}),
    "max_completion_tokens": (
        _CHAT,
        {"messages": _HELLO["messages"], "max_completion_tokens": 3},
    ),
    "a field that nobody knows": (_CHAT, {**_HELLO, "no_such_field": 1}),
    "another model": (_CHAT, {**_HELLO, "model": "another"}),
    "too long": (_CHAT, {"messages": [{"role": "user", "content": _LONG}], "max_tokens": 4}),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
    "two prompts": ("/v1/completions", {"prompt": ["Hello", "You"], "max_tokens": 3}),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "stream": False}),
    "message": ("/v1/messages", _HELLO),
    "embedding": (_EMBED, {"input": "Hello"}),
}
EMBEDDINGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "embedding": (_EMBED, {"input": "Hello you there"}),
    "two texts": (_EMBED, {"input": ["Hello", "You"]}),
    "dimensions": (_EMBED, {"input": "Hello", "dimensions": 8}),
    "a field that nobody knows": (_EMBED, {"input": "Hello", "no_such_field": 1}),
    "another model": (_EMBED, {"input": "Hello", "model": "another"}),
    "too long": (_EMBED, {"input": _LONG}),
    "tokens": (_EMBED, {"input": [1, 2, 3]}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
}
QUESTIONS: Final = {"chat": CHATS, "embed": EMBEDDINGS}
_REQUEST_ID: Final = "0123456789abcdef0123456789abcdef"
_MOST_NUMBERS: Final = 8
_NO_USE: Final = frozenset({"description", "examples", "example", "summary", "default"})
"""Of an OpenAPI document."""


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": _REQUEST_ID}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - a server of ours
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def record(name: str, version: str, base: str, model: str, sort: str) -> None:
    looks = {path: ask(base + path) for path in LOOKS}
    answers = answers_of(base, model, sort)
    content = {
        "server": name,
        "version": version,
        "from": "a run",
        "model": model,
        "sort": sort,
        "looks": {path: kept(*page) for path, page in looks.items() if page[0] != 404},
        "answers": {title: kept(*answer) for title, answer in answers.items()},
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (RECORDED / f"{name}.json").write_text(text + "\n")


def answers_of(base: str, model: str, sort: str) -> dict[str, tuple[int, bytes]]:
    """What it answers to each question."""
    v1 = "" if ask(f"{base}/v1/models")[0] == 404 else "/v1"
    answers = {}
    for title, (url, fields) in QUESTIONS[sort].items():
        path = url.replace("/v1", v1, 1) if url.startswith("/v1/") else url
        answers[title] = ask(base + path, {"model": model, **fields})
    return answers


def kept(status: int, body: bytes) -> dict[str, Any]:
    try:
        return {"status": status, "json": _shorter(json.loads(body))}
    except ValueError:
        lines = [line for line in body.decode().splitlines() if _says_something(line)]
        return {"status": status, "text": "\n".join(lines) + "\n"}


def _says_something(line: str) -> bool:
    return not line.startswith(("#", "python_", "process_", "http_"))


def _shorter(value: Any) -> Any:
    if isinstance(value, dict):
        is_document = "openapi" in value or "paths" in value
        return {
            key: _shorter(_without(inner) if is_document else inner) for key, inner in value.items()
        }
    if isinstance(value, list):
        numbers = value and all(isinstance(each, float) for each in value)
        return value[:_MOST_NUMBERS] if numbers else [_shorter(each) for each in value]
    return value


def _without(value: Any) -> Any:
    """Less what is only for people."""
    if isinstance(value, dict):
        return {
            key: _without(inner)
            for key, inner in value.items()
            if not (key in _NO_USE and not isinstance(inner, dict))
        }
    return [_without(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    record(*sys.argv[1:])
