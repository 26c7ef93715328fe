"""What a request's prompt begins with, and how long its answer may be: what planning looks at.

An engine's prefix cache sees a prompt as its chat template renders it: tools first, then the
messages in turn. The key of a request is those bytes, and nothing that is not rendered.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from batchyard.lines.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable

KEY_BYTES = 64 * 1024
"""The part of a prompt by which prompts are told apart."""
_DEFAULT_OUTPUT_TOKENS = 256
_MOST_TOKENS = 2**31
_AUDIO_BYTES = 4 * 1500
"""What stands for a recording, whose length is unknown: Whisper reads 30 s as 1,500 tokens."""
_SALT_CHARS = 128
"""vLLM refuses longer ones."""

_TEMPLATE_BYTES = 4096
"""Longer system prompts are told apart no further when lengths are learned."""
_BLOCK_BYTES = 256
"""What stands for the template of a prompt that begins with the user's words."""
_USER = b"\x1euser\x1f"
_ADAPTER = b"\x1d"
"""Around the name of an adapter, where a prompt key begins with one."""

_encode = msgspec.json.encode


def prompt_key(url: str, body: dict[str, Any], adapter: str = "") -> tuple[bytes, int]:
    """``(key, prompt length in bytes)``; the key is the URL, a NUL, and the prompt's beginning.

    Before the URL is the adapter's name, if any, and behind it the body's own ``cache_salt``:
    prompts share nothing across adapters, nor across salts.
    What a request takes besides text adds to the length what it weighs in tokens of four bytes.
    """
    endpoint, prompt = ENDPOINTS[url], bytearray()
    renderers = _CONVERSATION if endpoint.is_conversation else {}
    for field in endpoint.prompt:
        if field in body:
            renderers.get(field, _add_text)(body[field], prompt)
    size = len(prompt) + (_AUDIO_BYTES if endpoint.reads_recording else 0)
    del prompt[KEY_BYTES:]
    head = url.encode() + _own_salt(body)
    if adapter:
        head = _ADAPTER + adapter.encode() + _ADAPTER + head
    return head + b"\0" + bytes(prompt), size


def adapter_of(key: bytes) -> bytes:
    """The adapter of a prompt key; empty: none."""
    return key[1 : key.index(_ADAPTER, 1)] if key.startswith(_ADAPTER) else b""


def template_of(key: bytes) -> bytes:
    """A digest of what a prompt key has before the user's words, or of its first block.

    Each adapter has templates of its own: it answers at other lengths.
    """
    start = key.find(b"\0") + 1
    user = key.find(_USER, start, start + _TEMPLATE_BYTES)
    if user > start:
        end = user
    elif user < 0 and key[start : start + 1] == b"\x1e":
        end = start + _TEMPLATE_BYTES
    else:
        end = start + _BLOCK_BYTES
    return blake2b(adapter_of(key) + key[start:end], digest_size=16).digest()


def _own_salt(body: dict[str, Any]) -> bytes:
    salt = body.get("cache_salt")
    if not isinstance(salt, str) or not salt:
        return b""
    return b"\x1f" + salt[:_SALT_CHARS].replace("\0", "").encode()


def _add_tools(tools: Any, prompt: bytearray) -> None:
    if tools:
        prompt += _encode(tools)


def _add_instructions(instructions: Any, prompt: bytearray) -> None:
    """Text, or Anthropic's list of blocks of text."""
    if instructions and isinstance(instructions, str | list):
        prompt += b"\x1esystem\x1f"
        _add_text(instructions, prompt)


def _add_input(value: Any, prompt: bytearray) -> None:
    if isinstance(value, str):
        prompt += b"\x1euser\x1f" + value.encode()
    else:
        _add_messages(value, prompt)


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


_CONVERSATION: dict[str, Callable[[Any, bytearray], None]] = {
    "tools": _add_tools,
    "instructions": _add_instructions,
    "system": _add_instructions,
    "messages": _add_messages,
    "input": _add_input,
}
"""Fields that a chat template renders; all others are text."""


def output_limit(body: dict[str, Any]) -> tuple[int | None, int]:
    """``(limit, samples)``: the request's own bound on the output of all its samples, if any."""
    samples = _samples(body)
    for field in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        bound = body.get(field)
        if isinstance(bound, int) and bound > 0:
            return min(bound * samples, _MOST_TOKENS), samples
    return None, samples


def expected_output_tokens(url: str, body: dict[str, Any]) -> int:
    """How long an answer is taken to be before anything is known of such answers."""
    if not ENDPOINTS[url].writes_tokens:
        return 0
    limit, samples = output_limit(body)
    return _DEFAULT_OUTPUT_TOKENS * samples if limit is None else limit


def _samples(body: dict[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) and 0 < n <= 1024 else 1
