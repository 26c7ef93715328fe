"""The help of `batchyard`: its commands by task, in the order in which one needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from batchyard.cli.terminal.metavars import commands_below

if TYPE_CHECKING:
    from collections.abc import Callable

PANELS: Final = {
    "Run batches": ("run", "estimate", "submit", "retry", "results", "ledger"),
    "Watch": ("list", "show", "watch", "logs", "models"),
    "Operate": (
        *("cancel", "pause", "unpause", "priority"),
        *("deliveries", "deliver", "reconcile", "expire-files", "doctor"),
    ),
    "Administer": (
        *("up", "serve", "worker", "execute", "engine", "engine-node", "deploy", "migrate"),
        *("tenants", "keys", "audit", "webhooks", "secrets", "storage"),
    ),
}
"""The commands of each task, in their order."""

NAMED: Final = tuple(name for names in PANELS.values() for name in names)


def arrange(group: Any, summary_of: Callable[[str], str] | None) -> None:
    """Put the group's commands into their panels; others are behind them, without one.

    ``summary_of``: what a command says of itself in the list of all, where it is not imported.
    """
    place = {name: panel for panel, names in PANELS.items() for name in names}
    order = NAMED
    group.commands = {
        name: group.commands[name]
        for name in sorted(
            group.commands, key=lambda each: order.index(each) if each in place else len(order)
        )
    }
    for name, command in group.commands.items():
        command.rich_help_panel = place.get(name)
        if summary_of is not None and name in place:
            command.short_help = summary_of(name)


def list_options_plainly(command: Any) -> None:
    """Let commands with options list them without Rich's table, which cuts their names.

    It has six columns, of which none may be left out, so that 80 characters are too few for them.
    """
    for _, each in commands_below(command):
        if not hasattr(each, "commands"):
            each.rich_markup_mode = None
