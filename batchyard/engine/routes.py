"""Which endpoints a server serves, from its own OpenAPI description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


def post_routes(openapi: bytes) -> frozenset[str] | None:
    """The paths that take POST; None if ``openapi`` is no OpenAPI document that we can go by.

    One without a path under ``/v1/`` may count its paths from somewhere else.
    """
    try:
        paths = msgspec.json.decode(openapi, type=_Document).paths
    except msgspec.MsgspecError:
        return None
    posts = frozenset(path for path, methods in paths.items() if "post" in methods)
    return posts if any(path.startswith("/v1/") for path in posts) else None


def is_served(url: str, routes: Iterable[str]) -> bool:
    """Whether one of ``routes`` may take ``url``; ``{name}`` in a route stands for anything."""
    return any(
        re.fullmatch(_BRACES.sub(".+", re.escape(route)), url) if "{" in route else route == url
        for route in routes
    )


# As re.escape() leaves them.
_BRACES = re.compile(r"\\\{.*?\\\}")


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, Any]] = {}
