"""What help calls the values of options: words for people in place of Python's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperArgument, TyperOption

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_OPTIONS: Final = {
    "batch": "BATCH",
    "bytes_per_token": "NUMBER",
    "completion_window": "TIME",
    "output_expires_after": "TIME",
    "endpoint": "ENDPOINT",
    "engine_url": "URL",
    "errors": "PLACE",
    "event": "TYPE",
    "field": "NAME",
    "host": "ADDRESS",
    "input_file": "PLACE",
    "metadata": "KEY=VALUE",
    "metrics_host": "ADDRESS",
    "metrics_port": "PORT",
    "health_port": "PORT",
    "model": "MODEL",
    "name": "NAME",
    "notify_email": "ADDRESS",
    "output": "PLACE",
    "output_file": "PLACE",
    "port": "PORT",
    "prefect_port": "PORT",
    "resume": "BATCH",
    "tenant": "TENANT",
    "url": "URL",
    "wait": "SECONDS",
    "webhook_url": "URL",
}
_OF_TYPES: Final = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "PATH", "path": "PATH"}


def commands_below(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The command and every one below it, each with its words; hidden ones too."""
    yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_below(below, (*path, name))


def name_values(command: Any) -> None:
    """Give each option that has no word for its value one; a flag has no value."""
    for _, each in commands_below(command):
        # Its option --help is made for the first context, and then kept.
        for parameter in each.get_params(each.context_class(each, **each.context_settings)):
            if isinstance(parameter, TyperArgument):
                _name_argument(parameter)
            elif isinstance(parameter, TyperOption) and parameter.metavar is None:
                parameter.metavar = _word(parameter)


def _name_argument(argument: TyperArgument) -> None:
    """An argument's name stands before its type, which adds nothing to it but for a choice."""
    if argument.metavar is None:
        argument.metavar = (argument.name or "").upper()
    if not argument.type_descriptor.is_choice:
        argument.display_type_rich = _no_type  # type: ignore[method-assign] # Typer has no option


def _no_type(ctx: object) -> str:  # noqa: ARG001 - Typer passes it by its name
    return ""


def _word(option: TyperOption) -> str | None:
    if option.is_flag:
        return ""
    if option.type_descriptor.is_choice:
        return None
    bare = option.bare_type()
    return _OF_OPTIONS.get(option.name or "") or _OF_TYPES.get(bare, "TEXT")
