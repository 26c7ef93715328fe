"""JSON for programs, in one style: one object, or an object per line where there may be several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

OBJECT = typer.Option("--json", help="Print one JSON object.")
LINES = typer.Option("--json", help="Print a JSON object per line.")


def print_object(value: Any) -> None:
    """One object, over several lines; keys keep their order."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_lines(values: Iterable[Any]) -> None:
    """An object per line, each of which a reader sees at once."""
    for value in values:
        typer.echo(msgspec.json.encode(value).decode())
