"""How the help of a command begins, read from its source: to import all commands takes a second."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def first_paragraph(place: str) -> str:
    """Of ``module:name``, a function with a docstring or a group of commands with a ``help``."""
    module, _, name = place.partition(":")
    source = find_spec(module)
    assert source is not None and source.origin is not None  # noqa: PT018, S101 - a command's
    for each in ast.parse(Path(source.origin).read_bytes()).body:
        match each:
            case ast.FunctionDef(name=found) if found == name:
                return " ".join((ast.get_docstring(each) or "").split("\n\n")[0].split())
            case ast.Assign(
                targets=[ast.Name(id=found)],
                value=ast.Call(keywords=[ast.keyword(value=ast.Constant(value)), *_]),
            ) if found == name:
                return str(value)
    return ""
