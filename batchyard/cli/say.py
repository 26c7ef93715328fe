"""Output for users who may have closed the terminal meanwhile."""

from __future__ import annotations

import os
import sys
from typing import IO, Any, AnyStr, cast

import typer


def say(text: str, *, err: bool = False) -> None:
    """Print the text. Do nothing if the terminal or the reader of the output is gone."""
    typer.echo(text, file=unbroken(sys.stderr if err else sys.stdout))


def have_standard_streams() -> None:
    """Let a stream that the caller has closed (``>&-``) read and write nothing, like /dev/null.

    Call it before a file is opened: that gets the lowest free number, and a child process that
    writes to its standard output would write into the file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open to the end


def flush_output() -> OSError | None:
    """Write what is still in the buffers: at exit, Python would print a traceback for a failure.

    Returns why standard output lacks something, unless its reader is gone.
    """
    failure = None
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = None if isinstance(error, BrokenPipeError) else error
    for stream in (sys.stdout, sys.stderr):
        unbroken(stream).flush()
    return failure


def unbroken(stream: IO[AnyStr]) -> IO[AnyStr]:
    """The same stream, which drops text instead of failing once its reader is gone."""
    return cast("IO[AnyStr]", _Unbroken(stream))


class _Unbroken:
    def __init__(self, stream: IO[Any]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop_the_rest()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        """Python would try again at exit to write what is still in its buffer, and fail there."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
