"""The ``batchyard`` command.

The commands here use the database and, some of them, Prefect's REST API. Commands that run flows
are registered from outside, under the entry point group ``batchyard.commands``, because this
package does not import Prefect.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
import traceback
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

import batchyard
from batchyard.cli import deliveries, keys, sealing_keys, storage, tenants, webhooks
from batchyard.cli.audit import audit
from batchyard.cli.cancel import cancel
from batchyard.cli.deliver import deliver
from batchyard.cli.doctor import doctor
from batchyard.cli.estimate import estimate
from batchyard.cli.exit_status import ExitStatus, exit_status, in_a_line
from batchyard.cli.list_batches import list_batches
from batchyard.cli.list_models import models
from batchyard.cli.logs import logs
from batchyard.cli.metavars import name_values
from batchyard.cli.migrate import migrate
from batchyard.cli.notify_email import email
from batchyard.cli.panels import arrange
from batchyard.cli.quota import quota
from batchyard.cli.results import results
from batchyard.cli.retry import retry
from batchyard.cli.say import flush_output, say
from batchyard.cli.serve import serve
from batchyard.cli.show import show
from batchyard.cli.steer import pause, priority, unpause
from batchyard.cli.stoppable import LeftUnfinished, exit_without_waiting_on_signals, leave
from batchyard.cli.submit import submit
from batchyard.cli.upkeep import expire_files, reconcile
from batchyard.cli.watch import watch
from batchyard.errors import BatchyardError

COMMANDS = "batchyard.commands"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Only of standard output: what else is written raises an error of our own."""


def make_app() -> typer.Typer:
    """The command with every subcommand that is installed."""
    app = typer.Typer(
        help="Your own OpenAI Batch API, on your own GPUs.",
        epilog=in_a_line(),
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_whatever_the_command)
    for found in entry_points(group=COMMANDS):
        found.load()(app)
    app.command()(submit)
    app.command()(estimate)
    app.command("list")(list_batches)
    app.command()(show)
    app.command()(watch)
    app.command()(logs)
    app.command()(models)
    app.command()(results)
    app.command()(cancel)
    app.command()(pause)
    app.command()(unpause)
    # Earlier names, which still work in this release.
    app.command("resume", hidden=True)(unpause)
    app.command("quota", hidden=True)(quota)
    app.command("email", hidden=True)(email)
    # Otherwise a negative number would be taken for an option.
    app.command(context_settings={"ignore_unknown_options": True})(priority)
    app.command()(retry)
    app.command()(audit)
    app.add_typer(tenants.app, name="tenants")
    app.add_typer(keys.app, name="keys")
    app.add_typer(webhooks.app, name="webhooks")
    app.add_typer(deliveries.app, name="deliveries")
    app.command()(deliver)
    app.add_typer(sealing_keys.app, name="secrets")
    app.add_typer(storage.app, name="storage")
    app.command()(serve)
    app.command()(migrate)
    app.command()(doctor)
    app.command()(reconcile)
    app.command()(expire_files)
    return app


def make_command() -> Any:
    """The same as Click has it, arranged for people."""
    command = typer.main.get_command(make_app())
    arrange(command)
    name_values(command)
    return command


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


def main() -> None:
    """Run the command. A failure is one sentence on standard error, and a status that says why."""
    # On a terminal Prefect's client prints a notice about the use that it reports. vLLM reports its
    # own use as well, and obeys the same variable.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # It says that it tries again, and Python prints that where no handler is set.
    logging.getLogger("stamina").addHandler(logging.NullHandler())
    try:
        status = _status()
        lost = flush_output()
        if lost is not None and not status:
            say(_lost_output(lost), err=True)
            status = ExitStatus.FAILED
    finally:
        exit_without_waiting_on_signals()
    sys.exit(status)


def _status() -> Any:
    """Run the command; what :func:`sys.exit` is to be called with."""
    try:
        make_command()()
    except LeftUnfinished as unfinished:
        leave(unfinished)
    except SystemExit as ended:
        return ended.code
    except BatchyardError as error:
        say(f"batchyard: {error}", err=True)
        return exit_status(error)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort; the traceback is in the file
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            say(_lost_output(error), err=True)
        else:
            say(f"batchyard: {_unexpected(error)}", err=True)
        return ExitStatus.FAILED
    return ExitStatus.DONE


def _lost_output(error: OSError) -> str:
    return f"batchyard: The output could not be written: {error.strerror}."


def _unexpected(error: Exception) -> str:
    """One sentence; not the error's own text, which might hold a presigned URL."""
    descriptor, path = tempfile.mkstemp(prefix="batchyard-defect-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        traceback.print_exception(error, file=file)
    return (
        f"This should not happen ({type(error).__name__}). Please report it and attach {path}; "
        "remove anything confidential first."
    )
