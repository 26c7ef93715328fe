"""A batch's progress in a terminal: a bar where there is one, lines where there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from batchyard.steps.services import Progress as StepProgress

_TITLES = {
    "fetching": "Fetching the input",
    "validating": "Validating and planning",
    "loading": "Loading the model",
    "running": "Running requests",
    "collecting": "Collecting results",
    "publishing": "Publishing files",
}
_LINE_EVERY_SECONDS = 10.0


class ProgressDisplay:
    """Shows the progress of one batch on standard error. Use as a context manager.

    Its instances are what services take as ``on_progress``.
    """

    def __init__(self, *, title: str = "", console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[message]}", style="dim"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._phase = ""
        self._task: TaskID | None = None
        self._said_at = 0.0
        self._said = ""

    def __enter__(self) -> Self:
        if self._title:
            self._console.print(f"\n{self._title}", style="bold", markup=False)
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_phase()
        self._bars.stop()

    def __call__(self, progress: StepProgress) -> None:
        if progress.phase != self._phase:
            self._end_phase()
            self._phase = progress.phase
            self._task = self._bars.add_task(
                _TITLES.get(progress.phase, progress.phase), total=None, message=""
            )
            self._said_at = 0.0
        assert self._task is not None  # noqa: S101 - a phase has begun
        self._bars.update(
            self._task, completed=progress.done, total=progress.total, message=progress.message
        )
        self._say(progress)

    def _end_phase(self) -> None:
        if self._task is None:
            return
        done = self._bars.tasks[self._task].completed if not self._bars.disable else 0
        self._bars.update(self._task, total=max(done, 1), completed=max(done, 1), message="")
        self._task = None

    def _say(self, progress: StepProgress) -> None:
        """For logs and pipes: a line for each phase, and one now and then while it goes on."""
        if not self._bars.disable:
            return
        of_total = f" {progress.done:,}/{progress.total:,}" if progress.total else ""
        title = _TITLES.get(progress.phase, progress.phase)
        line = f"{title}:{of_total} {progress.message}".rstrip(": ")
        now = time.monotonic()
        if line != self._said and now - self._said_at >= _LINE_EVERY_SECONDS:
            self._console.print(line, markup=False)
            self._said, self._said_at = line, now
