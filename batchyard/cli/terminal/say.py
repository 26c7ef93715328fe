"""Output for users who may have closed the terminal meanwhile."""

from __future__ import annotations

import errno
import os
import sys
from typing import IO, Any, AnyStr, Final, cast

import typer

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of an output for which there may be room again."""
_no_room: Final[dict[IO[Any], OSError]] = {}
"""By stream: why some of its text is missing."""


def say(text: str, *, err: bool = False) -> None:
    """Print the text. Do nothing if the terminal or the reader of the output is gone.

    Where a file has no room for it, later texts are tried all the same.
    """
    typer.echo(text, file=unbroken(sys.stderr if err else sys.stdout))


def have_standard_streams() -> None:
    """Let a stream that the caller has closed (``>&-``) read and write nothing, like /dev/null.

    Call it before a file is opened: that gets the lowest free number, and a child process that
    writes to its standard output would write into the file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open to the end


def note_lost_output(error: OSError) -> None:
    """Let :func:`flush_output` return the error of a writer that does not use :func:`say`."""
    _no_room[sys.stdout] = error


def flush_output() -> OSError | None:
    """Write what is still in the buffers: at exit, Python would print a traceback for a failure.

    Returns why standard output lacks something, unless its reader is gone.
    """
    failure = _no_room.get(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                failure = error
            drop_the_rest(stream)
    return failure


def drop_the_rest(stream: IO[Any]) -> None:
    """Let what is still in the buffer, and what comes, go nowhere.

    Python would try again at exit to write it, and print a traceback.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def unbroken(stream: IO[AnyStr]) -> IO[AnyStr]:
    """The same stream, which drops text instead of failing: all of it once its reader is gone."""
    return cast("IO[AnyStr]", _Unbroken(stream))


class _Unbroken:
    def __init__(self, stream: IO[Any]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno in FULL:
            _no_room[self._stream] = error
        else:
            drop_the_rest(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
