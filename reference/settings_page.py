"""docs/reference/settings.md: each setting, from ``batchyard/settings.py`` and its docstrings.

Which roles read a setting is in one table, that of docs/deploy/several-machines.md.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from batchyard.settings import Settings
from batchyard.settings_sources import OTHER_VARIABLES, PREFIX
from reference.markdown import from_docstring, one_line, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_MACHINES: Final = Path(__file__).parents[1] / "docs" / "deploy" / "several-machines.md"
_ROLES: Final = ("API", "control", "GPU runner", "CLI")
_SHARING: Final = {"same": "the same on all", "own": "of each machine"}
_KINDS: Final = {
    bool: "`true` or `false`",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    SecretStr: "text, a secret",
}
_OTHERS: Final = {
    "BATCHYARD_CONFIG": "The file of settings to read, instead of the first `batchyard.toml` that "
    "is found.",
    "BATCHYARD_API_HOST": "The address that `batchyard serve` listens on, if there is no "
    "`--host`. 127.0.0.1 by default.",
    "BATCHYARD_API_PORT": "The port of `batchyard serve` and `batchyard up`, if there is no "
    "`--port`. 8000 by default.",
    "BATCHYARD_ENGINE_API_KEY": "The API key of the server at `batchyard run --engine-url`.",
    "BATCHYARD_METRICS_PORT": "The port on which `batchyard worker` and `batchyard execute` serve "
    "`/metrics`, if there is no `--metrics-port`.",
    "BATCHYARD_METRICS_HOST": "The address for it, if there is no `--metrics-host`. 127.0.0.1 by "
    "default.",
    "BATCHYARD_METRICS_FOLDER": "Where flow runs write their numbers for it. Set by "
    "`batchyard worker`; do not set it.",
}

_INTRODUCTION: Final = """\
# Settings

Each setting is a variable (`BATCHYARD_STORAGE`), or a line of `batchyard.toml` (`storage = …`; \
[where it is searched](../how-to/install.md#settings)). A variable with two underscores belongs to \
a part of the file: `BATCHYARD_LIMITS__MAX_REQUESTS` is `max_requests` below `[limits]`. Lists are \
JSON or comma-separated; other structures are JSON. An unknown name or an impossible value \
stops the start, and the message names it.

*Read by* says which [roles](../deploy/several-machines.md#settings) read a setting, and whether \
they must agree on it.
"""


def page() -> str:
    """The whole page."""
    entries = [_entry(*each) for each in _fields(Settings, PREFIX, "")]
    if _OTHERS.keys() != set(OTHER_VARIABLES):
        raise ValueError("reference/settings_page.py does not describe the OTHER_VARIABLES")
    others = table(("variable", ""), [(f"`{name}`", text) for name, text in _OTHERS.items()])
    return "\n".join([_INTRODUCTION, *entries, "## Variables that are not settings\n", others])


def _fields(
    model: type[BaseModel], prefix: str, role_name: str
) -> Iterator[tuple[str, FieldInfo, str, str]]:
    """The variable, the field, its docstring and its row in the table of roles."""
    docstrings = _docstrings(model)
    for name, field in model.model_fields.items():
        row = role_name or name.upper()
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{prefix}{name.upper()}__", row)
            continue
        if name not in docstrings:
            raise ValueError(f"{prefix}{name.upper()} has no docstring in batchyard/settings.py")
        yield f"{prefix}{name.upper()}", field, docstrings[name], row


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of the class."""
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == model.__name__
    )
    found = {}
    for field, following in itertools.pairwise(body):
        match field, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = text
    return found


def _entry(variable: str, field: FieldInfo, text: str, row: str) -> str:
    facts = [f"{_kind(field.annotation)}{_bounds(field)}", f"default {_default(field)}"]
    return (
        f"## `{variable}`\n\n{one_line(from_docstring(text))}\n\n"
        f"{'; '.join(facts)}. Read by {_readers(row)}.\n"
    )


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, UnionType):
        return next(_kind(part) for part in parts if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is list:
        return "A list"
    if origin is dict:
        return "A JSON object"
    kind = _KINDS[annotation]
    return kind[0].upper() + kind[1:]


def _bounds(field: FieldInfo) -> str:
    words = []
    for each in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤")):
            if (limit := getattr(each, attribute, None)) is not None:
                words.append(f"{sign} {limit:,}")
    return f", {' and '.join(words)}" if words else ""


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined and field.default_factory is not None:
        default = field.default_factory()  # type: ignore[call-arg]  # those here take nothing
    match default:
        case None:
            return "unset"
        case bool():
            return f"`{str(default).lower()}`"
        case list() | dict() if not default:
            return "empty"
        case float() | int():
            return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        case _:
            return f"`{default}`"


def _readers(row: str) -> str:
    """Which roles the table gives it to."""
    (line,) = (
        line for line in _MACHINES.read_text().splitlines() if line.startswith(f"| `{row}` |")
    )
    cells = [each.strip() for each in line.strip("|").split("|")]
    of_roles = dict(zip(_ROLES, cells[1:5], strict=True))
    parts = []
    for how in dict.fromkeys(each for each in of_roles.values() if each):
        roles = ", ".join(role for role, cell in of_roles.items() if cell == how)
        if how == "deployment":
            parts.append(f"{roles} (`batchyard deploy` sets it)")
        else:
            parts.append(f"{roles} ({_SHARING[how]})")
    return "; ".join(parts)
