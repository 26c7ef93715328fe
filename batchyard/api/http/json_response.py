"""JSON answers, written from the shapes in ``wire``. FastAPI's own encoder is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from fastapi import Response

from batchyard.wire import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


class JsonResponse(Response, Generic[T]):
    """A struct as ``application/json``, its keys in order.

    A route that returns ``JsonResponse[Batch]`` is described with the shape of ``Batch``.
    """

    media_type = "application/json"

    def __init__(
        self, value: T, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(to_json(value), status, headers=headers)
