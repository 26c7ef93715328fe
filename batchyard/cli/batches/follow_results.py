"""``batchyard results --follow``: result lines as they are finished."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, Self

import msgspec
import typer

from batchyard.cli.terminal.exit_status import ExitStatus, batch_status
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.say import drop_the_rest, say
from batchyard.errors import LocationRefused, StorageUnavailable, StoreUnavailable
from batchyard.files.cursor import parse_cursor
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location
from batchyard.processes.threads import in_thread
from batchyard.results.results import Outcome, head_of
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from batchyard.delivery.redeliver import Kind
    from batchyard.files.cursor import Order
    from batchyard.files.read_results import FinishedLine, ResultsPage
    from batchyard.store import BatchRecord

STDOUT = "-"
_PAGE_LINES: Final = 10_000
_BYTES_AT_ONCE: Final = 1024 * 1024
_OUTCOMES: Mapping[Kind, Outcome] = {"output": Outcome.OUTPUT, "error": Outcome.ERROR}


def follow_results(batch_id: str, places: Mapping[Kind, str], order: Order | None) -> NoReturn:
    """Write the lines of a batch until it has ended, and exit as `batchyard watch` does."""
    if len(set(places.values())) < len(places):
        raise typer.BadParameter(
            "Give each of the two kinds of lines its own place.", param_hint="--errors"
        )
    try:
        with ExitStack() as stack:
            files = [
                stack.enter_context(_Lines.to(place, _OUTCOMES[kind]))
                for kind, place in places.items()
            ]
            ended = asyncio.run(_follow(batch_id, files, order))
    except KeyboardInterrupt:
        say("batchyard: The batch continues.", err=True)
        sys.exit(ExitStatus.INTERRUPTED)
    sys.exit(batch_status(ended))


async def _follow(batch_id: str, files: list[_Lines], order: Order | None) -> BatchRecord:
    # NumPy takes a tenth of the time in which any command starts.
    from batchyard.files.found_lines import id_of  # noqa: PLC0415 - see above
    from batchyard.files.read_results import ResultsReader  # noqa: PLC0415 - see above

    written = {id_of(name) for file in files for name in file.had}
    outcomes = {file.outcome for file in files}
    async with offline_services() as services:
        reader = ResultsReader(services)
        cursor = parse_cursor(None, order)
        while True:
            with contextlib.suppress(StoreUnavailable, StorageUnavailable):
                batch = await services.store.batches.get(batch_id)
                page = await reader.page(batch, cursor, limit=_PAGE_LINES, outcomes=outcomes)
                await _write(page, files, written)
                cursor = page.next
                if not page.has_more:
                    return batch
                if page.found.size_bytes:
                    continue
            # Runners do not write more often, and each look lists all segments of the batch.
            await asyncio.sleep(services.settings.flush_seconds)


async def _write(page: ResultsPage, files: list[_Lines], written: set[int]) -> None:
    """Write a page, less the lines that are ``written`` already; each of these comes once.

    If it breaks off, all its lines come again: those that it has written are in ``written`` then.
    """
    seen: set[int] = set()
    lines: list[FinishedLine] = []
    held_bytes = 0

    async def flush() -> None:
        for file in files:
            mine = [each.line for each in lines if each.outcome is file.outcome]
            await in_thread(file.write, mine)
        seen.update(each.id for each in lines)
        lines.clear()

    try:
        async with contextlib.aclosing(page.lines()) as found:
            async for each in found:
                if each.id in written:
                    written.remove(each.id)
                    seen.add(each.id)
                    continue
                lines.append(each)
                held_bytes += len(each.line)
                if held_bytes >= _BYTES_AT_ONCE:
                    await flush()
                    held_bytes = 0
        await flush()
    except StorageUnavailable:
        written |= seen
        raise


@dataclass(slots=True)
class _Lines:
    """Standard output or a file, and which lines it takes. Use it as a context manager."""

    outcome: Outcome
    stream: BinaryIO
    name: str = "standard output"
    had: tuple[str, ...] = ()
    """The names of the lines that the file has from an earlier command."""

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
        drop_the_rest(stream)
        with os_errors_as_ours(name):
            raise


def _had(stream: BinaryIO, path: Path) -> tuple[str, ...]:
    """The names of a file's whole lines. What a killed process has left of a line is cut off.

    Raises :class:`~batchyard.errors.LocationRefused` for a file of something else, which is left
    as it is.
    """
    names, end = [], 0
    stream.seek(0)
    for line in stream:
        if _is_cut_off(line):
            break
        try:
            names.append(head_of(line).name)
        except ValueError:
            raise LocationRefused(
                f"{path} has a line that is not a result line: name another file"
            ) from None
        end += len(line)
    stream.truncate(end)
    return tuple(names)


def _is_cut_off(line: bytes) -> bool:
    """Whether this may be a result line without its end, if only without its line end.

    After a crash of the machine it may be zeros. Anything else may be a user's own text.
    """
    if line.endswith(b"\n") or not line.startswith((b"{", b"\0")):
        return False
    try:
        msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return True
    try:
        head_of(line)
    except ValueError:
        return False
    return True
