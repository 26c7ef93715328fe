"""The help of `batchyard`: its commands by task, in the order in which one needs them."""

from __future__ import annotations

from typing import Any, Final

from batchyard.cli.terminal.metavars import commands_below

PANELS: Final = {
    "Run batches": {
        "run": "Run a batch file on vLLM and write its result file.",
        "estimate": "Validate and plan a file and print what to expect, without submitting it.",
        "submit": "Create a batch for the workers, print its id, and return at once.",
        "retry": "Make a new batch from lines of a batch that has ended, and print its id.",
        "results": "Write the output file, the error file or both of a batch that has ended.",
    },
    "Watch": {
        "list": "List unfinished batches with their progress and expected end.",
        "show": "Show a batch: its status, why it waits, its requests, its files, and what "
        "went wrong.",
        "watch": "Show the progress of a batch until it has ended, and then how it ended.",
        "logs": "Show what has happened to a batch: its statuses, notifications, and "
        "Prefect's logs of it.",
        "models": "List configured models with their engines and waiting requests, or why no "
        "engine runs.",
    },
    "Operate": {
        "cancel": "Cancel a batch, and print its status. Finished lines keep their results.",
        "pause": "Start no more requests of a batch until it is unpaused. Its completion "
        "window continues.",
        "unpause": "Continue a paused batch.",
        "priority": "Set a batch's priority within its tenant. It applies from the batch's next "
        "chunk.",
        "deliveries": "List, show and resend webhooks and e-mails.",
        "deliver": "Attempt all webhooks and e-mails that are due now, and print the results.",
        "reconcile": "Stop overdue batches, clean up after crashed runners, and print what was "
        "found.",
        "expire-files": "Delete expired files and unreferenced objects, and print how many.",
        "doctor": "Check what this machine needs, and say what to do about each thing that "
        "does not work.",
    },
    "Administer": {
        "up": "Run everything on this machine until Ctrl-C: the API, Prefect, a worker on "
        "each pool.",
        "serve": "Serve the API for OpenAI's SDKs until Ctrl-C, or until its terminal is closed.",
        "worker": "Run flows of a Prefect work pool on this machine until Ctrl-C or SIGTERM.",
        "execute": "Run one flow run in this process, as the command of a Prefect work pool's "
        "container.",
        "engine": "Install vLLM for the engines of this machine.",
        "deploy": "Make pools, block types, engine blocks and deployments on the Prefect server.",
        "migrate": "Bring the database's tables up to this version, and return when that is done.",
        "tenants": "List tenants, and set and show their limits, addresses and use.",
        "keys": "Create, list and revoke API keys.",
        "audit": "List what operators did: keys, quotas, logins, batches that they cancelled "
        "or paused.",
        "webhooks": "Create, list, test, change and delete webhook endpoints.",
        "secrets": "Manage the keys that encrypt secrets in the database.",
        "storage": "Continue with a database that was restored from a backup.",
    },
}
"""The commands of each task, with the first sentence of their help."""


SUMMARIES: Final = {
    name: summary for summaries in PANELS.values() for name, summary in summaries.items()
}


def arrange(group: Any) -> None:
    """Put the group's commands into their panels; others are behind them, without one."""
    place = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(SUMMARIES)
    group.commands = {
        name: group.commands[name]
        for name in sorted(
            group.commands, key=lambda each: order.index(each) if each in place else len(order)
        )
    }
    for name, command in group.commands.items():
        command.rich_help_panel = place.get(name)
        command.short_help = SUMMARIES.get(name)


def list_options_plainly(command: Any) -> None:
    """Let commands with options list them without Rich's table, which cuts their names.

    It has six columns, of which none may be left out, so that 80 characters are too few for them.
    """
    for _, each in commands_below(command):
        if not hasattr(each, "commands"):
            each.rich_markup_mode = None
