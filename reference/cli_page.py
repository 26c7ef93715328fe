"""docs/reference/cli.md: every command, from its own help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer

from batchyard.cli import make_app
from reference.markdown import from_docstring, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRODUCTION: Final = """\
# Commands

Every command prints its help with `--help`. All of them read the [settings](settings.md). \
`batchyard --install-completion` completes commands and options in your shell.

The exit status is 0 if it is done, 1 if it failed or was refused (one sentence on standard error \
says why), 2 if the command line is wrong, and 130 or 143 after Ctrl-C or SIGTERM.
"""
_MORE: Final = {
    "run": "run-one-batch.md",
    "up": "use-the-api.md",
    "serve": "use-the-api.md#serve-only-the-api",
    "keys": "use-the-api.md#keys-and-tenants",
    "estimate": "estimate-a-batch.md",
    "webhooks": "receive-webhooks.md",
    "deliveries": "receive-webhooks.md#retries-and-replay",
    "email": "receive-webhooks.md",
    "secrets": "operate-batches.md#change-the-key-that-encrypts-secrets",
    "engine": "install.md#the-engines-environment",
    "migrate": "install.md#the-database",
    "deploy": "install.md#prefects-server",
    "worker": "install.md#workers",
    "doctor": "install.md#check-a-machine",
    "quota": "operate-batches.md#quotas",
    "retry": "operate-batches.md#retry",
    "reconcile": "operate-batches.md#the-reconciler",
    "submit": "operate-batches.md",
    "list": "operate-batches.md#watch",
    "results": "run-one-batch.md#input-and-output",
}
"""Where a how-to has examples of a command."""


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(make_app())
    parts = [_INTRODUCTION]
    for command, context in _commands(root, root.context_class(root, info_name="batchyard")):
        parts.append(_entry(command, context))
    return "\n".join(parts)


def _commands(group: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if command.hidden:
            continue
        inner = command.context_class(command, info_name=name, parent=context)
        yield command, inner
        if hasattr(command, "commands"):
            yield from _commands(command, inner)


def _entry(command: Any, context: Any) -> str:
    path = context.command_path
    level = "#" * (path.count(" ") + 1)
    pieces = (piece.strip("{}") for piece in command.collect_usage_pieces(context))
    usage = " ".join([path, *pieces])
    rows = [
        (_names(record[0]), record[1])
        for parameter in command.params
        if parameter.name not in {"help", "install_completion", "show_completion"}
        and (record := parameter.get_help_record(context)) is not None
    ]
    text = from_docstring(command.help or "").replace("\f", "")
    parts = [f"{level} {path}\n", f"{text}\n", f"```text\n{usage}\n```\n"]
    if rows:
        parts.append(table(("", ""), rows))
    if more := _MORE.get(path.removeprefix("batchyard ")):
        parts.append(f"[Examples](../how-to/{more})\n")
    return "\n".join(parts)


def _names(shown: str) -> str:
    """The names and the kind of value, as code; Python's names of types become words."""
    for python, word in (
        ("<list[str]>", "TEXT"),
        ("<str>", "TEXT"),
        ("<int>", "N"),
        ("<int range>", "N"),
        ("<float range>", "NUMBER"),
        ("N N", "N"),
        ("<path>", "PATH"),
        ("<Path>", "PATH"),
    ):
        shown = shown.replace(python, word)
    return f"`{shown.replace('|', ' or ')}`"
