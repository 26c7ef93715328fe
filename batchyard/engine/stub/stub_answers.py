"""The answers of :class:`~.stub.StubEngine`: deterministic, of the right shape.

The text depends on nothing but the request's bytes; usage is plausible, not counted. A body is
judged as a server would: 400 if it cannot be read, 404 for another model or an unknown route.
Where OpenAI's API takes a form it must be one, but for edits of images, which may be JSON.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from batchyard.lines.endpoints import COUNT_TOKENS, ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

EMBEDDING_DIMENSIONS = 8
CREATED_AT = 1_700_000_000
MAX_WORDS = 16

_MESSAGES = "/v1/messages"

Json = dict[str, Any]


class _Body(msgspec.Struct):
    """What the answers depend on; everything else is ignored."""

    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    input: Any = None
    messages: Any = None
    data: Any = None
    encoding_format: str = "float"
    dimensions: int | None = None
    documents: list[Any] = []
    items: Any = None
    text_2: Any = None
    data_2: Any = None
    top_n: int = 0


_decoder = msgspec.json.Decoder(_Body)
_encode = msgspec.json.encode


def answer_to(
    models: Collection[str], url: str, body: bytes, content_type: str = "application/json"
) -> tuple[int, bytes]:
    """The HTTP status and the body. ``models``: the names that it may carry."""
    path = url.partition("?")[0]
    make = ANSWERS.get(path)
    if make is None:
        return 404, _encode({"detail": "Not Found"})
    try:
        if content_type.startswith("multipart/form-data"):
            form = read_form(body, content_type)
            request = _Body(model=form.pop("model", (None, b""))[1].decode())
            # The boundary is another each time; the answer is not to be.
            body = repr(sorted(form.items())).encode()
        elif path in ENDPOINTS and ENDPOINTS[path].needs_file:
            return 400, _error("BadRequestError", 400, "a form is needed")
        else:
            request = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        return 400, _error("BadRequestError", 400, str(error))
    if request.model not in models:
        message = f"The model `{request.model}` does not exist."
        return 404, _error("NotFoundError", 404, message)
    return 200, _encode(make(request, body))


def read_form(body: bytes, content_type: str) -> dict[str, tuple[str | None, bytes]]:
    """Field → file name and content of a form. Raises ``ValueError`` for what is no form."""
    boundary = content_type.partition("boundary=")[2].encode()
    first, *parts, last = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if not boundary or first or last.strip() != b"--":
        raise ValueError("not a form")
    form: dict[str, tuple[str | None, bytes]] = {}
    for part in parts:
        head, separator, content = part.partition(b"\r\n\r\n")
        named = _NAMED.search(head.decode())
        if named is None or not separator:
            raise ValueError("a part of the form has no name")
        form[named[1]] = (named[2], content)
    return form


def error_body(status: int) -> bytes:
    """An error of the OpenAI shape, for an injected status."""
    return _error("InternalServerError" if status >= 500 else "BadRequestError", status, "injected")


def _error(kind: str, status: int, message: str) -> bytes:
    return _encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _completion(request: _Body, body: bytes) -> tuple[str, str, int, Json]:
    """Id, text, tokens and usage of a generated answer."""
    digest = _digest(body)
    asked = request.max_tokens or request.max_completion_tokens or request.max_output_tokens
    tokens = min(asked or MAX_WORDS, MAX_WORDS)
    text = " ".join(digest[start : start + 4] for start in range(0, 32, 4))[: 3 * tokens]
    prompt = max(1, len(body) // 4)
    choices = request.n or 1
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens * choices,
        "total_tokens": prompt + tokens * choices,
    }
    return digest, text, tokens, usage


def _finish_reason(tokens: int) -> str:
    return "length" if tokens < MAX_WORDS else "stop"


def _chat(request: _Body, body: bytes) -> Json:
    digest, text, tokens, usage = _completion(request, body)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": _finish_reason(tokens),
        }
        for index in range(request.n or 1)
    ]
    return {
        "id": f"chatcmpl-{digest}",
        "object": "chat.completion",
        "created": CREATED_AT,
        "model": request.model,
        "choices": choices,
        "usage": usage,
    }


def _text_completion(request: _Body, body: bytes) -> Json:
    digest, text, tokens, usage = _completion(request, body)
    choices = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": _finish_reason(tokens)}
        for index in range(request.n or 1)
    ]
    return {
        "id": f"cmpl-{digest}",
        "object": "text_completion",
        "created": CREATED_AT,
        "model": request.model,
        "choices": choices,
        "usage": usage,
    }


def _response(request: _Body, body: bytes) -> Json:
    digest, text, _, usage = _completion(request, body)
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {
        "id": f"msg_{digest}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }
    return {
        "id": f"resp_{digest}",
        "object": "response",
        "created_at": CREATED_AT,
        "status": "completed",
        "model": request.model,
        "output": [message],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _message(request: _Body, body: bytes) -> Json:
    digest, text, tokens, usage = _completion(request, body)
    return {
        "id": f"msg_{digest}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": request.model,
        "stop_reason": "max_tokens" if tokens < MAX_WORDS else "end_turn",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def _token_count(_: _Body, body: bytes) -> Json:
    count = len(body) // 4
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def _items(value: Any) -> list[Any]:
    """The inputs of a request that may carry one or several; a list of integers is one."""
    is_many = isinstance(value, list) and not (value and isinstance(value[0], int))
    return value if is_many else [value]


def _transcript(_: _Body, body: bytes) -> Json:
    return {"text": _digest(body), "usage": {"type": "duration", "seconds": 1}}


def _images(_: _Body, body: bytes) -> Json:
    picture = base64.b64encode(_digest(body).encode()).decode()
    details = {"text_tokens": 1, "image_tokens": 0}
    usage = {
        "input_tokens": 1,
        "input_tokens_details": details,
        "output_tokens": 8,
        "total_tokens": 9,
    }
    return {"created": CREATED_AT, "data": [{"b64_json": picture}], "usage": usage}


def _video(request: _Body, body: bytes) -> Json:
    return {
        "id": f"video_{_digest(body)}",
        "object": "video",
        "model": request.model,
        "status": "queued",
        "progress": 0,
        "created_at": CREATED_AT,
    }


def _moderation(request: _Body, body: bytes) -> Json:
    result = {
        "flagged": False,
        "categories": {"violence": False},
        "category_scores": {"violence": 0.0},
    }
    return {
        "id": f"modr-{_digest(body)}",
        "model": request.model,
        "results": [result for _ in _items(request.input)],
    }


def _embeddings(request: _Body, body: bytes) -> Json:
    data = [
        {"object": "embedding", "index": index, "embedding": _embedding(request, item)}
        for index, item in enumerate(_items(request.input))
    ]
    prompt = max(1, len(body) // 4)
    return {
        "object": "list",
        "data": data,
        "model": request.model,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
    }


def _embedding(request: _Body, item: Any) -> list[float] | str:
    """The vector of one input: floats, or base64 of little-endian float32."""
    size = request.dimensions or EMBEDDING_DIMENSIONS
    noise = hashlib.shake_128(_encode(item)).digest(2 * size)
    values = [short / 32768 for short in struct.unpack(f"<{size}h", noise)]
    if request.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{size}f", *values)).decode()
    return values


def _relevance(item: Any) -> float:
    return int.from_bytes(hashlib.blake2b(_encode(item), digest_size=2).digest(), "big") / 65536


def _judged(request: _Body) -> Any:
    choices = (request.text_2, request.documents or None, request.items, request.data_2)
    return next((value for value in choices if value is not None), None)


def _score(request: _Body, body: bytes) -> Json:
    data = [
        {"index": index, "object": "score", "score": _relevance(item)}
        for index, item in enumerate(_items(_judged(request)))
    ]
    return _list("score", request, body, data)


def _rerank(request: _Body, body: bytes) -> Json:
    results: list[Json] = [
        {"index": index, "document": {"text": item}, "relevance_score": _relevance(item)}
        for index, item in enumerate(request.documents)
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    return {
        "id": f"rerank-{_digest(body)}",
        "model": request.model,
        "usage": {"total_tokens": max(1, len(body) // 4)},
        "results": results[: request.top_n or None],
    }


def _classes(request: _Body, body: bytes) -> Json:
    items = _inputs(request)
    data = [
        {"index": index, "label": "LABEL_0", "probs": [1 - p, p], "num_classes": 2}
        for index, p in enumerate(_relevance(item) for item in items)
    ]
    return _list("classify", request, body, data)


def _pooled(request: _Body, body: bytes) -> Json:
    data = [
        {"index": index, "object": "pooling", "data": _embedding(request, item)}
        for index, item in enumerate(_inputs(request))
    ]
    return _list("pool", request, body, data)


def _inputs(request: _Body) -> list[Any]:
    """What a pooling model is given, under whichever name; messages together are one input."""
    given = (_items(request.input), [request.messages], _items(request.data))
    return next((items for items in given if items != [None]), [None])


def _list(kind: str, request: _Body, body: bytes, data: list[Json]) -> Json:
    prompt = max(1, len(body) // 4)
    return {
        "id": f"{kind}-{_digest(body)}",
        "object": "list",
        "created": CREATED_AT,
        "model": request.model,
        "data": data,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
    }


_SHAPES: dict[str, Callable[[_Body, bytes], Json]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _text_completion,
    "/v1/responses": _response,
    _MESSAGES: _message,
    "/v1/embeddings": _embeddings,
    "/v1/moderations": _moderation,
    "/v1/score": _score,
    "/score": _score,
    "/v1/rerank": _rerank,
    "/rerank": _rerank,
    "/v2/rerank": _rerank,
    "/v1/audio/transcriptions": _transcript,
    "/v1/audio/translations": _transcript,
    "/v1/images/generations": _images,
    "/v1/images/edits": _images,
    "/v1/videos": _video,
    "/v1/classify": _classes,
    "/classify": _classes,
    COUNT_TOKENS: _token_count,
}
ANSWERS = {path: _SHAPES.get(path, _pooled) for path in (*ENDPOINTS, COUNT_TOKENS)}
"""How each endpoint is answered: like vLLM's ``/pooling`` where it has no shape of its own."""
_NAMED = re.compile(r'name="([^"]*)"(?:; filename="([^"]*)")?')
