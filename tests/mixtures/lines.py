"""Requests whose words say what becomes of them, and the answers that are a function of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

MODEL: Final = "stub-model"
ADAPTER: Final = "law"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
ENOUGH_TOKENS: Final = 1000
"""With so many an answer is not cut off."""

REFUSED: Final = "[refused]"
"""The engine answers 400."""
CUT: Final = "[cut]"
"""The answer is cut off, unless the request gives it :data:`ENOUGH_TOKENS`."""
ALWAYS_CUT: Final = "[always-cut]"
FLAKY: Final = "[flaky]"
"""Each process of an engine answers 500 the first time."""
BUSY: Final = "[busy]"
"""Likewise 429."""
SLOW: Final = "[slow]"
FATES: Final = (REFUSED, CUT, ALWAYS_CUT, FLAKY, BUSY, SLOW)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an input. ``words`` are what is asked; ``is_bad``: it cannot be read."""

    custom_id: str
    url: str
    words: str
    model: str = MODEL
    is_bad: bool = False

    def body(self) -> dict[str, Any]:
        body = body_of(self.url, self.words)
        return {"model": self.model, **body}

    def as_object(self) -> dict[str, Any]:
        body = [] if self.is_bad else self.body()
        return {"custom_id": self.custom_id, "method": "POST", "url": self.url, "body": body}


def body_of(url: str, words: str) -> dict[str, Any]:
    """A body without a model. Of one that is deterministic the same words are the same request."""
    message = [{"role": "user", "content": words}]
    match url:
        case "/v1/chat/completions":
            return {"messages": message, "max_tokens": 16, "temperature": 0}
        case "/v1/completions":
            return {"prompt": words, "max_tokens": 16, "temperature": 0}
        case "/v1/messages":
            return {"messages": message, "max_tokens": 16}
        case "/v1/responses":
            return {"input": words, "max_output_tokens": 16}
        case _:
            return {"input": words}


def words_in(body: dict[str, Any]) -> str:
    """What a request asks."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt") or body.get("input"))


def reply(model: str, words: str) -> str:
    """The answer's text: a function of the request and of nothing else."""
    return hashlib.sha256(f"{model}|{words}".encode()).hexdigest()[:16]


def with_reply(url: str, answer: dict[str, Any], text: str) -> dict[str, Any]:
    """The stub's answer with this text in it."""
    match url:
        case "/v1/chat/completions":
            answer["choices"][0]["message"]["content"] = text
        case "/v1/completions":
            answer["choices"][0]["text"] = text
        case "/v1/messages":
            answer["content"][0]["text"] = text
        case "/v1/responses":
            answer["output"][0]["content"][0]["text"] = text
        case _:
            answer["data"][0]["embedding"] = [int(text[:6], 16) / 1e6, 0.5]
    return answer


def reply_in(answer: dict[str, Any]) -> str | float:
    """The text of an answer, or the first number of an embedding."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if "content" in answer:
        return str(answer["content"][0]["text"])
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    return float(answer["data"][0]["embedding"][0])


def expected_reply(url: str, model: str, words: str) -> str | float:
    text = reply(model, words)
    return int(text[:6], 16) / 1e6 if url == EMBEDDINGS else text


def as_input(lines: list[Line]) -> bytes:
    return b"".join(json.dumps(line.as_object()).encode() + b"\n" for line in lines)
