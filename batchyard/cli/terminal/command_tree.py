"""The commands as Typer has them, of which a process imports the one that it is to run.

Together they import nearly all of the product. Of the others only the names are known: they are
enough for the list of commands and for the answer to an unknown one.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import batchyard
from batchyard.cli.terminal.exit_status import in_a_line
from batchyard.cli.terminal.metavars import name_values
from batchyard.cli.terminal.panels import NAMED, arrange, list_options_plainly

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoints

ENTRY_POINTS: Final = "batchyard.commands"
_OURS: Final = {
    "submit": "batches.submit:submit",
    "estimate": "batches.estimate:estimate",
    "list": "batches.list_batches:list_batches",
    "show": "batches.show:show",
    "watch": "batches.watch:watch",
    "logs": "batches.logs:logs",
    "models": "operate.list_models:models",
    "results": "batches.results:results",
    "ledger": "batches.ledger:ledger",
    "cancel": "batches.cancel:cancel",
    "pause": "batches.steer:pause",
    "unpause": "batches.steer:unpause",
    "priority": "batches.steer:priority",
    "retry": "batches.retry:retry",
    "audit": "tenants.audit:audit",
    "tenants": "tenants.tenants:app",
    "keys": "tenants.keys:app",
    "webhooks": "tenants.webhooks:app",
    "deliveries": "operate.deliveries:app",
    "deliver": "operate.deliver:deliver",
    "secrets": "tenants.sealing_keys:app",
    "storage": "operate.storage:app",
    "serve": "operate.serve:serve",
    "migrate": "operate.migrate:migrate",
    "doctor": "operate.doctor:doctor",
    "engine-node": "operate.engine_node:engine_node",
    "reconcile": "operate.upkeep:reconcile",
    "expire-files": "operate.upkeep:expire_files",
    # Earlier names, which still work in this release.
    "resume": "batches.steer:unpause",
    "quota": "tenants.quota:quota",
    "email": "tenants.notify_email:email",
}
"""The module of this package that has each, and its function or its commands there."""
_ADDED_WITH: Final = {"execute": "worker"}
"""Commands that the entry point of another one adds."""
_SETTINGS: Final = {
    # Otherwise a negative number would be taken for an option.
    "priority": {"ignore_unknown_options": True},
}


def make_app(words: Sequence[str] | None = None) -> typer.Typer:
    """The command with every subcommand that is installed.

    With ``words``, those of a command line, only the one that they name can be run.
    """
    app = typer.Typer(
        help="Your own OpenAI Batch API, on your own GPUs.",
        epilog=in_a_line(),
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_whatever_the_command)
    if words is None:
        for name in _OURS:
            _add_ours(app, name)
        _add_installed(app, None)
        return app
    named = _named(words)
    for name in set(NAMED) - {named}:
        app.command(name)(_is_not_named)
    if named in _OURS:
        _add_ours(app, named)
    else:
        _add_installed(app, named)
    return app


def make_command(words: Sequence[str] | None = None) -> Any:
    """The same as Click has it, arranged for people."""
    command = typer.main.get_command(make_app(words))
    # Only the list of all commands shows summaries, and to read them takes time.
    arrange(command, None if words and _named(words) else _summary)
    name_values(command)
    list_options_plainly(command)
    return command


def _named(words: Sequence[str]) -> str:
    """The command that a command line names; empty: none."""
    return next((word for word in words if not word.startswith("-")), "")


def _summary(name: str) -> str:
    """How the help of a command begins."""
    if name in _OURS:
        return first_paragraph(f"batchyard.cli.{_OURS[name]}")
    wanted = _ADDED_WITH.get(name, name)
    places = [f"{each.module}:{name}" for each in _installed() if each.name == wanted]
    return first_paragraph(places[0]) if places else ""


def _add_ours(app: typer.Typer, name: str) -> None:
    module, _, attribute = _OURS[name].partition(":")
    found = getattr(import_module(f"batchyard.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name, hidden=name not in NAMED, context_settings=_SETTINGS.get(name))(found)


def _add_installed(app: typer.Typer, named: str | None) -> None:
    """Add the commands of entry points: the named one with those that no list has, or all."""
    wanted = _ADDED_WITH.get(named or "", named)
    for found in _installed():
        if wanted is None or found.name == wanted or found.name not in NAMED:
            found.load()(app)


def _installed() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415 - most commands are ours

    return entry_points(group=ENTRY_POINTS)


def _is_not_named() -> None:
    """Stands for a command that the command line does not name, and is never called."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"batchyard {batchyard.__version__}")
        raise typer.Exit


def _whatever_the_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before every command."""


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
