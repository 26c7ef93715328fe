"""JSON answers, written from the shapes in ``wire``. FastAPI's own encoder is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Response

from batchyard.wire import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value``, a struct or plain data, as ``application/json`` with its keys in order."""
    return Response(
        to_json(value), status, headers=dict(headers or {}), media_type="application/json"
    )
