"""What a server says of its models: its list, and answers that tell of a missing one."""

from __future__ import annotations

import msgspec


def listed_models(body: bytes) -> set[str] | None:
    """The names in the answer of ``/v1/models``; None if it is no such list."""
    try:
        return {model.id for model in _decode_list(body).data}
    except (ValueError, RecursionError):
        return None


def may_be_of_server(status: int, answer: bytes, model: str) -> bool:
    """Whether this answer to a request may say that the server refuses us or lacks the model.

    A server without the request's endpoint answers 404 too, and does not name the model.
    """
    return status == 401 or (status == 404 and model.encode() in answer)


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


_decode_list = msgspec.json.Decoder(_ModelList).decode
