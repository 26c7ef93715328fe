"""What the engine's own log says: how far its start has come, and why it failed.

Knows vLLM's wording and nothing else; a line that it does not recognise is no progress and no
cause. Nothing here decides whether the engine is ready.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

from batchyard.engine.base import StartProgress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_CAUSE_LINES = 20
MAX_LINE_CHARACTERS = 500
READ_BYTES = 1 << 20
LAST_BYTES = 1 << 18
"""What is read of the log of an engine that was lost: some thousand lines."""

_PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\)\s)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
_HARMLESS = re.compile(r"^(?:\([\w-]+ pid=\d+\)\s)?(?:DEBUG|INFO|WARNING) ")
_PRIVATE = re.compile(r"prompt|content|scheduler_output", re.IGNORECASE)
"""A line with such a word may quote a request."""
_SHARDS = re.compile(r"checkpoint shards.*?(\d+)/(\d+)")
_CUDA_GRAPHS = re.compile(r"Capturing CUDA graphs.*?(\d+)/(\d+)", re.IGNORECASE)
_STAGES = (
    ("Resolved architecture", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("Warming up model", "warming up"),
    ("KV cache size", "warming up"),
    ("Starting vLLM server", "starting the server"),
)

# The last line of a traceback, argparse's complaint, or the kernel's.
_EXCEPTION = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)(?::|$)|\berror: |Out of memory|Killed"
)
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Failed core proc",
    "EngineDeadError",
    "KeyboardInterrupt",
    "CancelledError",
    "destroy_process_group",
)
_TRACEBACK = re.compile(
    r'^\s*(?:File "|Traceback \(|[\^~]+\s*$)'
    r"|^\s*The above exception|^\s*During handling of the above"
)


class LogTail:
    """Yields the lines that a growing file has got since it was last asked."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._partial = ""

    def new_lines(self) -> list[str]:
        """The complete lines since the last call; a progress bar's redraws count as lines.

        There are none while the file cannot be read: an operator may remove it while the engine
        starts.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        text = self._partial + data.decode(errors="replace")
        *lines, self._partial = re.split(r"[\r\n]", text)
        return [line for line in lines if line.strip()]

    def rest(self) -> list[str]:
        """Read like :meth:`new_lines`, with the unfinished last line."""
        lines = self.new_lines()
        if self._partial.strip():
            lines.append(self._partial)
            self._partial = ""
        return lines


def progress_of(line: str) -> StartProgress | None:
    """The progress that a line tells of, if it does."""
    if shards := _SHARDS.search(line):
        done, total = int(shards[1]), int(shards[2])
        return StartProgress(f"loading weights {done}/{total}", done / total if total else None)
    if graphs := _CUDA_GRAPHS.search(line):
        done, total = int(graphs[1]), int(graphs[2])
        return StartProgress(f"capturing CUDA graphs {done}/{total}", done / max(total, 1))
    for words, message in _STAGES:
        if words in line:
            return StartProgress(message)
    return None


def cause_of(lines: Iterable[str]) -> list[str]:
    """The lines of a failed start that say why, at most ``MAX_CAUSE_LINES``, oldest first.

    vLLM logs the true cause in the process where it happened and then again, in general terms,
    in each process above. So: every exception with the lines that belong to its message, the
    general ones left out, the latest kept when there are too many; the end of the log where
    there is no exception at all.
    """
    plain = _without_warnings(lines)
    return _exceptions(plain) or [line[:MAX_LINE_CHARACTERS] for line in plain[-MAX_CAUSE_LINES:]]


def _without_warnings(lines: Iterable[str]) -> list[str]:
    """Warnings that mention errors are not causes."""
    return [_PREFIX.sub("", line.rstrip()) for line in lines if not _HARMLESS.match(line)]


def _exceptions(plain: Iterable[str]) -> list[str]:
    causes: deque[str] = deque(maxlen=MAX_CAUSE_LINES)
    is_message = False
    for line in plain:
        if _TRACEBACK.search(line):
            is_message = False
        elif _EXCEPTION.search(line):
            is_message = not any(words in line for words in _CONSEQUENCES)
        elif is_message and not line.startswith(" "):
            is_message = False
        if is_message and line not in causes:
            causes.append(line[:MAX_LINE_CHARACTERS])
    return list(causes)


def cause_of_loss(log_path: Path, start: int) -> list[str]:
    """The lines of a log that say why its engine ended; none where there is no error.

    ``start`` is where the engine's part of the log begins. Lines that may quote a request are left
    out, because this goes into the log of a flow run.
    """
    size = log_path.stat().st_size
    begin = start if start <= size else 0  # another engine of this log has begun it anew
    log = LogTail(log_path, start=max(begin, size - LAST_BYTES))
    lines = [line for line in log.rest() if not _PRIVATE.search(line)]
    return _exceptions(_without_warnings(lines))
