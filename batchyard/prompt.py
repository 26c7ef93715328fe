"""What a request's prompt begins with, and how long its answer may be: what planning looks at.

An engine's prefix cache sees a prompt as its chat template renders it: tools first, then the
messages in turn. The key of a request is those bytes, and nothing that is not rendered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

KEY_BYTES = 64 * 1024
"""Longer prompts are told apart no further."""
_DEFAULT_OUTPUT_TOKENS = 256
_AUDIO_BYTES = 4 * 1500
"""What stands for a recording, whose length nobody knows: Whisper reads 30 s as 1,500 tokens."""
_SALT_CHARS = 128
"""vLLM refuses longer ones."""
_ASKED = ("query", "queries", "text_1", "data_1")
_JUDGED = ("documents", "items", "text_2", "data_2")

_encode = msgspec.json.encode


def prompt_key(url: str, body: dict[str, Any]) -> tuple[bytes, int]:
    """``(key, prompt length in bytes)``; the key is the URL, a NUL, and the prompt's beginning.

    Behind the URL is the body's own ``cache_salt``, if any: prompts share nothing across salts.
    What a request takes besides text adds to the length what it weighs in tokens of four bytes.
    """
    prompt = bytearray()
    _PROMPTS.get(url, _any_prompt)(body, prompt)
    size = len(prompt) + (_AUDIO_BYTES if url in _HEARD else 0)
    del prompt[KEY_BYTES:]
    return url.encode() + _own_salt(body) + b"\0" + bytes(prompt), size


def _own_salt(body: dict[str, Any]) -> bytes:
    salt = body.get("cache_salt")
    if not isinstance(salt, str) or not salt:
        return b""
    return b"\x1f" + salt[:_SALT_CHARS].replace("\0", "").encode()


def _chat_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_tools(body, prompt)
    _add_messages(body.get("messages"), prompt)


def _responses_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_tools(body, prompt)
    if isinstance(body.get("instructions"), str):
        prompt += b"\x1esystem\x1f" + body["instructions"].encode()
    if isinstance(body.get("input"), str):
        prompt += b"\x1euser\x1f" + body["input"].encode()
    else:
        _add_messages(body.get("input"), prompt)


def _completions_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_text(body.get("prompt"), prompt)


def _scored_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    """What is asked first: it is what the pairs of many requests share."""
    for field in _ASKED + _JUDGED:
        if field in body:
            _add_text(body[field], prompt)


def _any_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    for field in ("input", "messages", "data", "prompt"):
        if field in body:
            _add_text(body[field], prompt)


_PROMPTS: dict[str, Callable[[dict[str, Any], bytearray], None]] = {
    "/v1/chat/completions": _chat_prompt,
    "/v1/responses": _responses_prompt,
    "/v1/completions": _completions_prompt,
    **dict.fromkeys(("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"), _scored_prompt),
}
_HEARD = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_WRITTEN = _HEARD | {"/v1/chat/completions", "/v1/responses", "/v1/completions"}
"""The endpoints whose answers are made token by token."""


def _add_tools(body: dict[str, Any], prompt: bytearray) -> None:
    if body.get("tools"):
        prompt += _encode(body["tools"])


def _add_messages(messages: Any, prompt: bytearray) -> None:
    if not isinstance(messages, list):
        return
    for message in messages:
        if not isinstance(message, dict):
            _add_text(message, prompt)
            continue
        prompt += b"\x1e" + str(message.get("role", "")).encode() + b"\x1f"
        _add_text(message.get("content"), prompt)
        if message.get("tool_calls"):
            prompt += _encode(message["tool_calls"])


def _add_text(value: Any, prompt: bytearray) -> None:
    """Text as it is; a list (parts, several inputs) in turn; token ids and the rest as JSON."""
    if isinstance(value, str):
        prompt += value.encode()
    elif isinstance(value, list) and value and not isinstance(value[0], int | float):
        for part in value:
            text = part.get("text") if isinstance(part, dict) else part
            _add_text(part if text is None else text, prompt)
    elif value is not None:
        prompt += _encode(value)


def expected_output_tokens(url: str, body: dict[str, Any]) -> int:
    """The request's own bound on its output, the only hint there is before it runs."""
    if url not in _WRITTEN:
        return 0
    for field in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        bound = body.get(field)
        if isinstance(bound, int) and bound > 0:
            return min(bound * _samples(body), 2**31)
    return _DEFAULT_OUTPUT_TOKENS * _samples(body)


def _samples(body: dict[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) and 0 < n <= 1024 else 1
