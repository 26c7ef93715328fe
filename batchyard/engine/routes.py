"""Which endpoints a server serves, from its own OpenAPI description."""

from __future__ import annotations

from typing import Any

import msgspec

STANDARD_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
    }
)
"""What a server that does not describe itself is taken to serve."""


def post_routes(openapi: bytes) -> frozenset[str] | None:
    """The paths that take POST; None if ``openapi`` is no OpenAPI document with paths."""
    try:
        paths = msgspec.json.decode(openapi, type=_Document).paths
    except msgspec.MsgspecError:
        return None
    posts = frozenset(path for path, methods in paths.items() if "post" in methods)
    return posts or None


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, Any]] = {}
