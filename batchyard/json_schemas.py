"""Whether a JSON schema is one, by the shape of its keywords. Pure.

It is one walk without recursion, whose work is the size of the schema: schemas are clients', and
the meta-schema of jsonschema takes a second for a large one. Of each keyword only the kind of its
value is checked, in every draft's reading. What a keyword means, and whether an engine has it, is
not known here; regular expressions are never run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ONE: Final = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_BY_NAME: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _names_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(_is_text(name) and name in _TYPES for name in names)


_WANTED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (_names_types, f"must be one or several of {', '.join(sorted(_TYPES))}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "must list some values"),
    "required": (_are_texts, "must be a list of names"),
    "items": (
        lambda value: _is_schema(value) or value == [] or _are_schemas(value),
        "must be a schema or a list of schemas",
    ),
    "dependencies": (lambda value: isinstance(value, dict), "must be an object"),
    "uniqueItems": (_is_flag, "must be true or false"),
    **dict.fromkeys(("$ref", "pattern", "format", "$schema"), (_is_text, "must be a text")),
    **dict.fromkeys(_ONE, (_is_schema, "must be a schema, which is an object, true or false")),
    **dict.fromkeys(_LIST, (_are_schemas, "must be a list of schemas that is not empty")),
    **dict.fromkeys(_BY_NAME, (_are_named_schemas, "must be an object of schemas")),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "must be a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda value: _is_number(value) or _is_flag(value), "must be a number"),
    ),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "must be a number above 0"),
    **dict.fromkeys(
        (
            *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
            *("minContains", "maxContains"),
        ),
        (_is_size, "must be a whole number that is not negative"),
    ),
}


def schema_defect(schema: Any) -> str | None:
    """What is wrong with the schema, in words that quote nothing but its keys; None: nothing."""
    if not _is_schema(schema):
        return "the schema must be an object, true or false"
    left: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while left:
        path, node = left.pop()
        if not isinstance(node, dict):
            continue
        for keyword, value in node.items():
            wanted = _WANTED.get(keyword)
            if wanted is not None and not wanted[0](value):
                return f"{_shown((*path, keyword))} {wanted[1]}"
            left += _inner(path, keyword, value)
    return None


def _inner(path: tuple[str, ...], keyword: str, value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The schemas in a keyword that is as it should be, with their places."""
    here = (*path, keyword)
    if keyword in _BY_NAME:
        return [((*here, str(name)), each) for name, each in value.items()]
    if keyword in _ONE or (keyword == "items" and isinstance(value, dict)):
        return [(here, value)]
    if keyword in _LIST or keyword == "items":
        return [(here, each) for each in (value if isinstance(value, list) else ())]
    return []


def _shown(path: tuple[str, ...]) -> str:
    return ".".join(re.sub(r"[^\w$-]", "?", key)[:40] for key in path[-6:])
