"""The help of `batchyard`: its commands by task, in the order in which one needs them."""

from __future__ import annotations

from typing import Any, Final

PANELS: Final = {
    "Run batches": ("run", "estimate", "submit", "retry", "results"),
    "Watch": ("list", "show", "watch", "logs", "models"),
    "Operate": (
        *("cancel", "pause", "unpause", "priority", "deliveries", "deliver"),
        *("reconcile", "expire-files", "doctor"),
    ),
    "Administer": (
        *("up", "serve", "worker", "execute", "engine", "deploy", "migrate"),
        *("tenants", "keys", "audit", "webhooks", "secrets", "storage"),
    ),
}


def arrange(group: Any) -> None:
    """Put the group's commands into their panels; others are behind them, without one."""
    place = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(place)
    group.commands = {
        name: group.commands[name]
        for name in sorted(
            group.commands, key=lambda each: order.index(each) if each in place else len(order)
        )
    }
    for name, command in group.commands.items():
        command.rich_help_panel = place.get(name)
