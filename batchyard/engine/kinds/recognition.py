"""Asks a server once what it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.engine.kinds import (
    infinity,
    llama_cpp,
    llama_cpp_python,
    sglang,
    tei,
    transformers_serve,
    unknown,
    vllm,
)
from batchyard.engine.kinds.kind import MODELS, OPENAPI, Pages
from batchyard.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.engine.kinds.kind import ServerKind

    Ask = Callable[[str], Awaitable[tuple[int, bytes]]]
    """GETs a path, and returns status and body. Raises
    :class:`~batchyard.errors.EngineError`."""

KINDS: Final = (
    vllm.KIND,
    sglang.KIND,
    llama_cpp.KIND,
    llama_cpp_python.KIND,
    transformers_serve.KIND,
    infinity.KIND,
    tei.KIND,
)
_MORE: Final = (OPENAPI, "/info", "/props")
"""Asked if the list of models does not say whose it is."""
_SECONDS: Final = 5.0
"""For all of them together. Who is slower is unknown."""


async def recognise(ask: Ask, listing: bytes = b"") -> ServerKind:
    """The kind of the server that answers, and that lists its models so. Raises nothing."""
    pages = {MODELS: listing}
    if (kind := _kind_of(pages)) is not None:
        return kind
    try:
        async with asyncio.timeout(_SECONDS), asyncio.TaskGroup() as group:
            for path in _MORE:
                group.create_task(_read(ask, path, pages))
    except TimeoutError:
        pass
    return _kind_of(pages) or unknown.KIND


def _kind_of(pages: dict[str, bytes]) -> ServerKind | None:
    return next((kind for kind in KINDS if kind.is_it(Pages(pages))), None)


async def _read(ask: Ask, path: str, into: dict[str, bytes]) -> None:
    try:
        status, body = await ask(path)
    except EngineError:
        return
    if status == 200:
        into[path] = body


async def seats_of(kind: ServerKind, ask: Ask) -> int | None:
    """How many requests a server of this kind runs at once, by its own words; None: it is silent.

    Raises nothing.
    """
    pages: dict[str, bytes] = {}
    if kind.seats_page is not None:
        await _read(ask, kind.seats_page, pages)
    return kind.seats(Pages(pages))
