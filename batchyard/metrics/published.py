"""What a flow run tells its worker's exporter of itself: numbers in a file, every two seconds.

One file for each engine of the worker, and for each process that takes batches through their
steps. The next process with the same labels continues the counters of the one before, so that they
never go down while the worker lives. The exporter only reads; see ADR 38.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard import intervals
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.processes.beside import every
from batchyard.processes.threads import in_executor, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

log = event_logger(__name__)

FOLDER_VARIABLE: Final = "BATCHYARD_METRICS_FOLDER"
"""Set by `batchyard worker --metrics-port` for its flow runs."""
_MOST_AT_ONCE: Final = 64
"""Processes with the same labels."""

Counters = dict[str, dict[str, float]]
"""Counts under the name of the metric and the value of its own label."""


class Figures(msgspec.Struct, frozen=True):
    """The numbers of one process. ``gauges`` are true while it runs; ``counters`` only grow."""

    gauges: dict[str, float] = msgspec.field(default_factory=dict)
    counters: Counters = msgspec.field(default_factory=dict)
    socket: str | None = None
    """The Unix socket on which its engine serves metrics of its own."""
    parts: Counters = msgspec.field(default_factory=dict)
    """Gauges with a label of their own, each by the value of that label."""


class Published(msgspec.Struct, frozen=True):
    """The content of a file. ``labels`` tell its numbers from those of other files."""

    labels: dict[str, str]
    figures: Figures


@contextlib.asynccontextmanager
async def publishing(labels: Mapping[str, str], read: Callable[[], Figures]) -> AsyncIterator[None]:
    """Publish what ``read`` returns while the block runs, and a last time at its end.

    ``read`` is called in the event loop. The last one of ``labels`` gets a number if another
    process has the same ones. Does nothing if the worker has no exporter. Raises nothing of its
    own: an error with metrics must not end a batch.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        yield
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            claim = partial(_claim, Path(folder), dict(labels))
            place = await in_executor(None, claim, undo=_LockedFile.release)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("metrics.not_published", describe(error))
        else:
            stack.callback(place.release)
            await stack.enter_async_context(_kept_up_to_date(place, read))
        yield


@contextlib.asynccontextmanager
async def _kept_up_to_date(place: _LockedFile, read: Callable[[], Figures]) -> AsyncIterator[None]:
    async def write() -> None:
        try:
            await in_thread(place.write, read())
        except Exception as error:  # noqa: BLE001 - see publishing()
            log.debug("metrics.not_published", describe(error))

    try:
        async with every(lambda: intervals.METRICS_SECONDS, write, name="metrics"):
            yield
    finally:
        await write()


class _LockedFile:
    """A file that this process has locked, and the counters of those that had it before."""

    def __init__(self, path: Path, labels: dict[str, str], lock: int) -> None:
        self._path = path
        self._labels = labels
        self._lock = lock
        before = _read(path)
        self._before = {} if before is None else before.figures.counters

    def write(self, figures: Figures) -> None:
        """Replace the content of the file."""
        counters = _sum(self._before, figures.counters)
        figures = msgspec.structs.replace(figures, counters=counters)
        content = msgspec.json.encode(Published(self._labels, figures))
        new = self._path.with_suffix(".new")
        new.write_bytes(content)
        new.replace(self._path)

    def release(self) -> None:
        """Let another process have it. Its gauges no longer count."""
        os.close(self._lock)


def published(folder: Path) -> Iterator[tuple[Published, bool]]:
    """The content of each file, and whether its process still runs."""
    for path in sorted(folder.glob("*.json")):
        if (content := _read(path)) is not None:
            yield content, _is_locked(path.with_suffix(".lock"))


def _claim(folder: Path, labels: dict[str, str]) -> _LockedFile:
    name = hashlib.sha256(msgspec.json.encode(labels)).hexdigest()[:16]
    last = next(reversed(labels))
    for number in range(_MOST_AT_ONCE):
        path = folder / f"{name}-{number}.json"
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        own = labels | {last: f"{labels[last]}-{number}"} if number else labels
        return _LockedFile(path, own, lock)
    raise BlockingIOError(f"{_MOST_AT_ONCE} processes publish the same numbers")


def _read(path: Path) -> Published | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Published)
    except (OSError, msgspec.DecodeError):
        return None


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _sum(one: Counters, other: Counters) -> Counters:
    return {
        name: {
            label: one.get(name, {}).get(label, 0) + other.get(name, {}).get(label, 0)
            for label in one.get(name, {}) | other.get(name, {})
        }
        for name in one | other
    }
