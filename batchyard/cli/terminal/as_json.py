"""JSON for programs, in one style: one object, or an object per line where there may be several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OBJECT = typer.Option("--json", help="Print one JSON object.")
_NO_FIELD: Final = object()
LINES = typer.Option("--json", help="Print a JSON object per line.")


def print_object(value: Any) -> None:
    """One object, over several lines; keys keep their order."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_field(value: Any, name: str) -> None:
    """One field of an object, for scripts: text as it is, nothing for null, all else as JSON.

    ``name`` has dots for what is inside: ``request_counts.completed``. Raises
    ``typer.BadParameter`` with the names that there are.
    """
    found = _field(value, name)
    if found is _NO_FIELD:
        raise typer.BadParameter(
            f"There is no field '{name}'. The fields are: {', '.join(_names(value))}.",
            param_hint="--field",
        )
    if isinstance(found, str) or found is None:
        typer.echo(found or "")
    else:
        typer.echo(msgspec.json.encode(found).decode())


def _field(value: Any, name: str) -> Any:
    """A name may have dots itself, as keys of metadata do."""
    if not isinstance(value, dict):
        return _NO_FIELD
    if name in value:
        return value[name]
    head, _, rest = name.partition(".")
    return _field(value.get(head), rest)


def _names(value: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, each in value.items():
        yield f"{before}{name}"
        if isinstance(each, dict):
            yield from _names(each, f"{before}{name}.")


def json_line(value: Any) -> str:
    """The object, in one line."""
    return msgspec.json.encode(value).decode()


def print_lines(values: Iterable[Any]) -> None:
    """An object per line, each of which a reader sees at once."""
    for value in values:
        typer.echo(json_line(value))
