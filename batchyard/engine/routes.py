"""Which endpoints a server serves and what they take, from its own OpenAPI description."""

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
    except (ValueError, RecursionError):
        return None
    posts = frozenset(path for path, methods in paths.items() if "post" in methods)
    return posts if any(path.startswith("/v1/") for path in posts) else None


def routes_with_field(openapi: bytes, field: str) -> frozenset[str]:
    """The paths that take POST with a JSON object that may have ``field``."""
    try:
        document = msgspec.json.decode(openapi, type=_Document)
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(
        path
        for path, methods in document.paths.items()
        if _has_field(_body_schema(methods), field, document.components, _MOST_NESTING)
    )


def _body_schema(methods: Any) -> Any:
    found = methods
    for key in ("post", "requestBody", "content", "application/json", "schema"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _has_field(schema: Any, field: str, components: Any, depth: int) -> bool:
    if not isinstance(schema, dict) or depth == 0:
        return False
    if field in (schema.get("properties") or ()):
        return True
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    name = str(schema.get("$ref", "")).removeprefix("#/components/schemas/")
    inner.append((components.get("schemas") or {}).get(name))
    return any(_has_field(each, field, components, depth - 1) for each in inner)


def is_served(url: str, routes: Iterable[str]) -> bool:
    """Whether one of ``routes`` may take ``url``; ``{name}`` in a route stands for anything."""
    return any(_may_take(route, url) for route in routes)


def _may_take(route: str, url: str) -> bool:
    """Without regular expressions: a route may have any number of names in it."""
    first, *others = _NAME.split(route)
    if not others:
        return route == url
    if not url.startswith(first):
        return False
    position = len(first)
    *between, last = others
    for text in between:
        # A name stands for at least one character.
        found = url.find(text, position + 1)
        if found < 0:
            return False
        position = found + len(text)
    return url.endswith(last) and len(url) - len(last) > position


_NAME = re.compile(r"\{[^{}]*\}")


_MOST_NESTING = 6


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, Any]] = {}
    components: dict[str, Any] = {}
