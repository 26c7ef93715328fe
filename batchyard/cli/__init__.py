"""The ``batchyard`` command.

The commands here need the database at most. Those that run flows are registered from outside,
under the entry point group ``batchyard.commands``: this package does not know Prefect.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from batchyard.cli.show import show
from batchyard.cli.submit import submit
from batchyard.errors import BatchyardError

COMMANDS = "batchyard.commands"


def make_app() -> typer.Typer:
    """The command with every subcommand that is installed."""
    app = typer.Typer(
        help="Your own OpenAI Batch API, on your own GPUs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in entry_points(group=COMMANDS):
        command.load()(app)
    app.command()(submit)
    app.command()(show)
    return app


def main() -> None:
    """Run the command; what goes wrong is one sentence on standard error and exit status 1."""
    try:
        make_app()()
    except BatchyardError as error:
        sys.exit(f"batchyard: {error}")
