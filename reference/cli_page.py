"""docs/reference/cli.md: every command, from its own help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from batchyard.cli import make_command
from batchyard.cli.terminal.exit_status import MEANINGS, ExitStatus
from reference.markdown import from_docstring, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRODUCTION: Final = """\
# Commands

Every command prints its help with `--help`. All of them read the [settings](settings.md). \
`batchyard --install-completion` completes commands and options in your shell.

With `--json` a command prints JSON for programs: one object, or an object per line where there \
may be several. `batchyard resume`, `quota` and `email` are earlier names of `unpause`, \
`tenants quota` and `tenants email`; they work in this release.

## Exit status

One sentence on standard error says why a command was not done.

{statuses}"""
_MORE: Final = {
    "run": "run-one-batch.md",
    "up": "use-the-api.md",
    "serve": "use-the-api.md#serve-only-the-api",
    "keys": "use-the-api.md#keys-and-tenants",
    "estimate": "estimate-a-batch.md",
    "webhooks": "receive-webhooks.md",
    "deliveries": "receive-webhooks.md#retries-and-replay",
    "tenants email": "receive-webhooks.md",
    "tenants quota": "operate-batches.md#quotas",
    "secrets": "operate-batches.md#change-the-key-that-encrypts-secrets",
    "engine": "install.md#the-engines-environment",
    "migrate": "install.md#the-database",
    "deploy": "install.md#prefects-server",
    "worker": "install.md#workers",
    "doctor": "install.md#check-a-machine",
    "retry": "operate-batches.md#retry",
    "reconcile": "operate-batches.md#the-reconciler",
    "submit": "operate-batches.md",
    "list": "operate-batches.md#watch",
    "logs": "operate-batches.md#watch",
    "models": "operate-batches.md#watch",
    "results": "operate-batches.md#follow-the-answers",
}
"""Where a how-to has examples of a command."""


def page() -> str:
    """The whole page."""
    root = make_command()
    statuses = table(("", ""), ((str(each.value), MEANINGS[each]) for each in ExitStatus))
    parts = [_INTRODUCTION.format(statuses=statuses)]
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
    """The names and the kind of value, as code."""
    return f"`{shown.replace('|', ' or ').strip()}`"
