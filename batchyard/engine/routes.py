"""Which endpoints a server serves and what they take, from its own OpenAPI description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.lines.body_fields import INNER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchyard.lines.body_fields import Routes


def post_routes(openapi: bytes, *, without_v1: bool = False) -> Routes | None:
    """The routes of a server; None if ``openapi`` is no OpenAPI document that we can go by.

    One without a path under ``/v1/`` may count its paths from somewhere else. ``without_v1``: it
    is known to have ``/v1/embeddings`` at ``/embeddings``.

    A server that says that it takes other fields too may read them, or hand them on to another
    one. vLLM says so and ignores them (0.32 names them in its debug log).
    """
    try:
        document = msgspec.json.decode(openapi, type=_Document)
    except (ValueError, RecursionError):
        return None
    search = _Search(document.components.get("schemas"), ignores_others=_OF_VLLM in openapi)
    posts = {
        path: search.fields_of(_body_schema(methods))
        for path, methods in document.paths.items()
        if "post" in methods
    }
    if without_v1:
        posts |= {f"/v1{path}": fields for path, fields in posts.items()}
    return posts if any(path.startswith("/v1/") for path in posts) else None


def routes_with_field(openapi: bytes, field: str) -> frozenset[str]:
    """The paths that take POST with a JSON object that may have ``field``."""
    try:
        document = msgspec.json.decode(openapi, type=_Document)
    except (ValueError, RecursionError):
        return frozenset()
    search = _Search(document.components.get("schemas"))
    return frozenset(
        path
        for path, methods in document.paths.items()
        if search.finds(field, _body_schema(methods))
    )


def _body_schema(methods: Any) -> Any:
    found = methods
    for key in ("post", "requestBody", "content", "application/json", "schema"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


class _Search:
    """For fields in the schemas of one document, which may be large and refer to itself.

    The document is a stranger's and is searched in the event loop: beyond a number of schemas, a
    field counts as not named, and which fields there are is not known.
    """

    def __init__(self, schemas: Any, *, ignores_others: bool = False) -> None:
        self._ignores_others = ignores_others
        self._named = (
            {f"{_REFERENCE}{name}": schema for name, schema in schemas.items()}
            if isinstance(schemas, dict)
            else {}
        )
        self._left = _MOST_SCHEMAS

    def finds(self, field: str, schema: Any) -> bool:
        """Whether an object of this schema may have the field."""
        return any(field in _properties(each) for each in self._reachable(schema))

    def fields_of(self, schema: Any) -> frozenset[str] | None:
        """The fields that an object of this schema may have; None: any."""
        found = self._names(schema)
        if found is None:
            return None
        inner = self._names(found.get(INNER)) if INNER in found else {}
        of_inner = ["*"] if inner is None else inner
        return frozenset([*found, *(f"{INNER}.{name}" for name in of_inner)])

    def _names(self, schema: Any) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for each in self._reachable(schema):
            found |= _properties(each)
            if each.get("type") == "null" or not _REFERRING.isdisjoint(each):
                continue
            takes_others = each.get("additionalProperties") not in (None, False)
            if "properties" not in each or (takes_others and not self._ignores_others):
                return None
        return found if found and self._left > 0 else None

    def _reachable(self, schema: Any) -> Iterator[dict[str, Any]]:
        """The schema and those that it says its object may be of."""
        seen: set[str] = set()
        to_visit = [schema]
        while to_visit and self._left > 0:
            each = to_visit.pop()
            if not isinstance(each, dict):
                continue
            yield each
            parts = [part for key in _PARTS if isinstance(part := each.get(key), list)]
            # Before they are taken up: a list may be long, and stand behind many paths.
            self._left -= 1 + sum(map(len, parts))
            for part in parts:
                to_visit += part
            name = each.get("$ref")
            if isinstance(name, str) and name not in seen:
                seen.add(name)
                to_visit.append(self._named.get(name))


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


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
_REFERRING: Final = frozenset({"$ref", *_PARTS})
_OF_VLLM: Final = b'"vllm_xargs"'
"""A field of vLLM's own requests."""
_REFERENCE: Final = "#/components/schemas/"
_MOST_SCHEMAS: Final = 100_000
"""In one document, each counted once for each path that refers to it."""


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, Any]] = {}
    components: dict[str, Any] = {}
