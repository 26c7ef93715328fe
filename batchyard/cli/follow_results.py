"""``batchyard results --follow``: result lines as they are finished."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NoReturn, Self

import msgspec
import typer

from batchyard.cli.exit_status import ExitStatus
from batchyard.cli.offline import offline_services
from batchyard.cli.say import say, unbroken
from batchyard.errors import LocationRefused, StorageUnavailable, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.results import Outcome
from batchyard.storage.file import os_errors_as_ours
from batchyard.storage.local_file import LocalFile
from batchyard.storage.location import parse_location
from batchyard.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from batchyard.delivery.redeliver import Kind
    from batchyard.files.live_results import FinishedLine, LiveResults

STDOUT = "-"
_OUTCOMES: Mapping[Kind, Outcome] = {"output": Outcome.OUTPUT, "error": Outcome.ERROR}


def follow_results(batch_id: str, places: Mapping[Kind, str]) -> NoReturn:
    """Write the lines of a batch until it has ended, and exit as `batchyard watch` does."""
    if len(set(places.values())) < len(places):
        raise typer.BadParameter("The two kinds of lines need two places.", param_hint="--errors")
    try:
        with ExitStack() as stack:
            files = [
                stack.enter_context(_Lines.to(place, _OUTCOMES[kind]))
                for kind, place in places.items()
            ]
            ended = asyncio.run(_follow(batch_id, files))
    except KeyboardInterrupt:
        say("batchyard: The batch continues.", err=True)
        sys.exit(ExitStatus.INTERRUPTED)
    sys.exit(ExitStatus.DONE if ended is BatchStatus.COMPLETED else ExitStatus.FAILED)


async def _follow(batch_id: str, files: list[_Lines]) -> BatchStatus:
    # NumPy takes a tenth of the time in which any command starts.
    from batchyard.files.live_results import LiveResults  # noqa: PLC0415

    async with offline_services() as services:
        had = [custom_id for file in files for custom_id in file.had]
        results = LiveResults(services, batch_id, had)
        while True:
            async for part in _readable(results):
                for file in files:
                    lines = [each.line for each in part if each.outcome is file.outcome]
                    await in_thread(file.write, lines)
            if results.batch is not None:
                return results.batch.status
            # Runners do not write more often, and each look lists all segments of the batch.
            await asyncio.sleep(services.settings.flush_seconds)


async def _readable(results: LiveResults) -> AsyncIterator[list[FinishedLine]]:
    """The lines that can be read now; none if the database or the object store does not answer."""
    with contextlib.suppress(StoreUnavailable, StorageUnavailable):
        async for part in results.read():
            yield part


class _Line(msgspec.Struct):
    custom_id: str


@dataclass(slots=True)
class _Lines:
    """Standard output or a file, and which lines it takes. Use it as a context manager."""

    outcome: Outcome
    stream: BinaryIO
    name: str = "standard output"
    had: tuple[str, ...] = ()
    """The ids of the lines that the file has from an earlier command."""

    @classmethod
    def to(cls, place: str, outcome: Outcome) -> _Lines:
        """Raises :class:`~batchyard.errors.StorageError` for a place that cannot be continued."""
        if place == STDOUT:
            return cls(outcome, sys.stdout.buffer)
        location = parse_location(place)
        if not isinstance(location, LocalFile):
            raise LocationRefused(
                f"{location} cannot be written line by line: follow into a file on this machine or "
                "standard output, and write the whole file there when the batch has ended"
            )
        with os_errors_as_ours(place):
            stream = location.path.open("a+b")
            try:
                return cls(outcome, stream, place, _had(stream, location.path))
            except BaseException:
                stream.close()
                raise

    def write(self, lines: list[bytes]) -> None:
        """Append whole lines, so that a reader sees them at once."""
        if not lines:
            return
        write_to(self.stream, b"".join(lines), self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not sys.stdout.buffer:
            self.stream.close()


def write_to(stream: BinaryIO, data: bytes, name: str = "standard output") -> None:
    """Write all of it, so that a reader has it at once.

    Raises ``BrokenPipeError``, which ends a command without a message, where the reader is gone,
    and otherwise :class:`~batchyard.errors.StorageError`.
    """
    try:
        stream.write(data)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError:
        # Python would try again at exit to write what is still in the buffer.
        unbroken(stream).flush()
        with os_errors_as_ours(name):
            raise


def _had(stream: BinaryIO, path: Path) -> tuple[str, ...]:
    """The ids of a file's whole lines. What a killed process has left of a line is cut off."""
    custom_ids, end = [], 0
    stream.seek(0)
    for line in stream:
        if not line.endswith(b"\n"):
            break
        try:
            custom_ids.append(msgspec.json.decode(line, type=_Line).custom_id)
        except msgspec.MsgspecError:
            raise LocationRefused(
                f"{path} has a line that is no result line: name another file"
            ) from None
        end += len(line)
    stream.truncate(end)
    return tuple(custom_ids)
