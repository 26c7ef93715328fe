"""Which endpoints a server serves and what they take, from its own OpenAPI description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

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
    search = _Search(field, document.components.get("schemas"))
    return frozenset(
        path for path, methods in document.paths.items() if search.finds_in(_body_schema(methods))
    )


def _body_schema(methods: Any) -> Any:
    found = methods
    for key in ("post", "requestBody", "content", "application/json", "schema"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


class _Search:
    """For a field in the schemas of one document, which may be large and refer to itself.

    The document is a stranger's and is searched in the event loop: beyond a number of schemas, the
    field counts as not named.
    """

    def __init__(self, field: str, schemas: Any) -> None:
        self._field = field
        self._named = (
            {f"{_REFERENCE}{name}": schema for name, schema in schemas.items()}
            if isinstance(schemas, dict)
            else {}
        )
        self._left = _MOST_SCHEMAS

    def finds_in(self, schema: Any) -> bool:
        """Whether an object of this schema may have the field."""
        seen: set[str] = set()
        to_visit = [schema]
        while to_visit and self._left > 0:
            each = to_visit.pop()
            if not isinstance(each, dict):
                continue
            properties = each.get("properties")
            if isinstance(properties, dict) and self._field in properties:
                return True
            parts = [part for key in _PARTS if isinstance(part := each.get(key), list)]
            # Before they are taken up: a list may be long, and stand behind many paths.
            self._left -= 1 + sum(map(len, parts))
            for part in parts:
                to_visit += part
            name = each.get("$ref")
            if isinstance(name, str) and name not in seen:
                seen.add(name)
                to_visit.append(self._named.get(name))
        return False


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


_PARTS: Final = ("anyOf", "oneOf", "allOf")
_REFERENCE: Final = "#/components/schemas/"
_MOST_SCHEMAS: Final = 100_000
"""In one document, each counted once for each path that refers to it."""


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, Any]] = {}
    components: dict[str, Any] = {}
