"""The ``batchyard`` command.

The commands here use the database and, some of them, Prefect's REST API. Commands that run flows
are registered from outside, under the entry point group ``batchyard.commands``, because this
package does not import Prefect.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import sys
import tempfile
import traceback
from typing import Any

from batchyard.cli.terminal.command_tree import make_app, make_command
from batchyard.cli.terminal.exit_status import ExitStatus, exit_status
from batchyard.cli.terminal.say import (
    FULL,
    flush_output,
    have_standard_streams,
    note_lost_output,
    say,
)
from batchyard.cli.terminal.stoppable import LeftUnfinished, exit_without_waiting_on_signals, leave
from batchyard.errors import BatchyardError
from batchyard.logs.printable import printable
from batchyard.web.proxies import without_proxy

__all__ = ["main", "make_app", "make_command"]

_COMPLETE = "_BATCHYARD_COMPLETE"
_SURROGATES = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes of an argument that are not UTF-8."""
_NO_ROOM = FULL | {errno.EIO}
"""Only of standard output: what else is written raises an error of our own."""


def main() -> None:
    """Run the command. A failure is one sentence on standard error, and a status that says why."""
    have_standard_streams()
    # On a terminal Prefect's client prints a notice about the use that it reports. vLLM reports its
    # own use as well, and obeys the same variable.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Also for the processes that it starts.
    os.environ |= without_proxy(os.environ)
    # It says that it tries again, and Python prints that where no handler is set.
    logging.getLogger("stamina").addHandler(logging.NullHandler())
    try:
        status = _status()
        if lost := flush_output():
            say(f"batchyard: The output could not be written: {lost.strerror}.", err=True)
            status = status or ExitStatus.FAILED
    finally:
        exit_without_waiting_on_signals()
    sys.exit(status)


def _status() -> Any:
    """Run the command; what :func:`sys.exit` is to be called with."""
    try:
        _command()()
    except LeftUnfinished as unfinished:
        leave(unfinished)
    except SystemExit as ended:
        return ended.code
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort; the traceback is in the file
        return _failed(error)
    return ExitStatus.DONE


def _failed(error: Exception) -> ExitStatus:
    """Say what has happened; the status for it."""
    if (word := _word_without_utf8(error)) is not None:
        say(
            f"batchyard: {printable(word)} is not UTF-8, as names, values and paths must be.",
            err=True,
        )
        return ExitStatus.WRONG_COMMAND_LINE
    if isinstance(error, BatchyardError):
        say(f"batchyard: {error}", err=True)
        return exit_status(error)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        note_lost_output(error)
    else:
        say(f"batchyard: {_unexpected(error)}", err=True)
    return ExitStatus.FAILED


def _word_without_utf8(error: BaseException | None) -> str | None:
    """The argument that has caused the error, if some code could not encode it."""
    while error is not None and not isinstance(error, UnicodeEncodeError):
        error = error.__cause__ or error.__context__
    words = sys.argv[1:] if error is not None else []
    return next((word for word in words if _SURROGATES.search(word)), None)


def _command() -> Any:
    """The command that the command line names."""
    # What imports make stays: to look for garbage among it takes a tenth of their time.
    gc.disable()
    try:
        # A shell that completes a command gives its words in another way.
        return make_command(None if _COMPLETE in os.environ else sys.argv[1:])
    finally:
        gc.freeze()
        gc.enable()


def _unexpected(error: Exception) -> str:
    """One sentence; not the error's own text, which might hold a presigned URL."""
    descriptor, path = tempfile.mkstemp(prefix="batchyard-defect-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        traceback.print_exception(error, file=file)
    return (
        f"This should not happen ({type(error).__name__}). Please report it and attach {path}; "
        "remove anything confidential first."
    )
