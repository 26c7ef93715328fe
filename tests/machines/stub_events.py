"""The answers of the stub engine as streams: what vLLM's server sends for ``"stream": true``."""

from __future__ import annotations

from typing import Any

import msgspec

_MESSAGES = "/v1/messages"

Json = dict[str, Any]


class _Stream(msgspec.Struct):
    stream: bool | None = None
    stream_options: Json | None = None

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


_encode = msgspec.json.encode


def events_of(url: str, body: bytes, answer: bytes) -> list[bytes] | None:
    """The server-sent events of a good answer, a word each, as vLLM has them; None: no stream.

    Their usage is in the last one, and only if the body asks for it; a response always has it.
    """
    try:
        asked = msgspec.json.decode(body, type=_Stream)
    except ValueError:
        return None
    path = url.partition("?")[0]
    if not asked.stream or path not in _STREAMS:
        return None
    events = _STREAMS[path](msgspec.json.decode(answer), with_usage=asked.wants_usage)
    # Anthropic's streams end with an event of their own.
    return events if path == _MESSAGES else [*events, b"data: [DONE]\n\n"]


def _stream_choices(answer: Json, *, with_usage: bool) -> list[bytes]:
    choice = answer["choices"][0]
    is_chat = "message" in choice
    text = choice["message"]["content"] if is_chat else choice["text"]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": kind}
    words = [f"{word} " for word in text.split()]
    pieces: list[Json] = [
        {"delta": {"content": word}} if is_chat else {"text": word} for word in words
    ]
    if is_chat:
        pieces.insert(0, {"delta": {"role": "assistant", "content": ""}})
    chunks: list[Json] = [
        {**head, "choices": [{"index": 0, "finish_reason": None, **piece}]} for piece in pieces
    ]
    chunks[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return [b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks]


def _stream_response(answer: Json, *, with_usage: bool) -> list[bytes]:
    text = answer["output"][0]["content"][0]["text"]
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": "response.created", "response": begun}]
    item = answer["output"][0]["id"]
    events += [
        {
            "type": "response.output_text.delta",
            "item_id": item,
            "output_index": 0,
            "content_index": 0,
            "delta": f"{word} ",
        }
        for word in text.split()
    ]
    events.append({"type": "response.completed", "response": answer})
    return [
        b"event: %b\ndata: %b\n\n"
        % (event["type"].encode(), _encode({**event, "sequence_number": number}))
        for number, event in enumerate(events)
    ]


def _stream_message(answer: Json, *, with_usage: bool) -> list[bytes]:
    begun = {**answer, "content": [], "stop_reason": None}
    (block,) = answer["content"]
    events: list[Json] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {**block, "text": ""}},
    ]
    events += [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": f"{word} "},
        }
        for word in block["text"].split()
    ]
    stopped = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    events += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": stopped, "usage": answer["usage"]},
        {"type": "message_stop"},
    ]
    return [
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)) for event in events
    ]


_STREAMS = {
    "/v1/chat/completions": _stream_choices,
    "/v1/completions": _stream_choices,
    "/v1/responses": _stream_response,
    _MESSAGES: _stream_message,
}
