"""A batch's progress in a terminal: a bar where there is one, lines where there is none."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from batchyard.cli.terminal.say import unbroken
from batchyard.logs.time_words import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.services.services import Progress as StepProgress

_TITLES = {
    "connecting": "Connecting to Prefect",
    "fetching": "Fetching the input",
    "validating": "Validating and planning",
    "loading": "Loading the model",
    "running": "Running requests",
    "collecting": "Collecting results",
    "publishing": "Publishing files",
    "cancelling": "Cancelling",
}
_TITLE_WIDTH = max(map(len, _TITLES.values()))
_LINE_EVERY_SECONDS = 30.0
_LEFT_AFTER_SECONDS = 2.0
_NUMBERS = re.compile(r"\d+")


class ProgressDisplay:
    """Shows the progress of one batch on standard error. Use as a context manager.

    Its instances are what services take as ``on_progress``. The phase that goes on has a bar; of
    one that has ended a line stays. On the way out the last phase counts as done unless
    :meth:`fail` was called or an exception passes.
    """

    def __init__(
        self,
        *,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._clock = clock
        self._console = console or Console(file=unbroken(sys.stderr), highlight=False)
        self._is_live = self._console.is_terminal
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[message]}", style="dim", markup=False),
            console=self._console,
            transient=True,
            disable=not self._is_live,
        )
        self._now: StepProgress | None = None
        self._task: TaskID | None = None
        self._began_at = 0.0
        self._done_before = 0
        self._said_at = -math.inf
        self._said = ""
        self._stage = ""
        self._log = _ToConsole(self._console)

    def __enter__(self) -> Self:
        if self._title:
            self._console.print(f"\n{self._title}", style="bold", markup=False)
        self._bars.start()
        logging.getLogger("batchyard").addHandler(self._log)
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        self._end_phase(is_done=error_type is None)
        logging.getLogger("batchyard").removeHandler(self._log)
        self._bars.stop()

    def __call__(self, progress: StepProgress) -> None:
        if self._now is None or progress.phase != self._now.phase:
            self._end_phase(is_done=True)
            self._begin_phase(progress)
        self._now = progress
        if self._is_live:
            self._draw(progress)
        else:
            self._say(progress)

    def fail(self) -> None:
        """The phase that goes on has failed."""
        self._end_phase(is_done=False)

    # -- phases -----------------------------------------------------------------------------

    def _begin_phase(self, progress: StepProgress) -> None:
        self._began_at = self._clock()
        self._done_before = progress.done
        self._said_at = -math.inf
        if self._is_live:
            title = _title(progress).ljust(_TITLE_WIDTH)
            self._task = self._bars.add_task(title, total=None, amount="", message="")

    def _end_phase(self, *, is_done: bool) -> None:
        ended, self._now = self._now, None
        if ended is None:
            return
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        if not self._is_live and is_done and self._elapsed() < 1.0 and not ended.total:
            return  # the line that began it says it all
        mark = "[green]✓[/]" if is_done else "[red]✗[/]"
        parts = [_title(ended).ljust(_TITLE_WIDTH), duration(self._elapsed()), _amount(ended)]
        line = "  ".join(filter(None, parts))
        self._console.print(f"{mark} {escape(line)}", soft_wrap=True)

    def _elapsed(self) -> float:
        return self._clock() - self._began_at

    # -- one phase --------------------------------------------------------------------------

    def _draw(self, progress: StepProgress) -> None:
        assert self._task is not None  # noqa: S101 - a phase has begun
        self._bars.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            amount=_amount(progress),
            message=progress.message or self._left(progress),
        )

    def _left(self, progress: StepProgress) -> str:
        """How long it will still take, at the pace of this phase so far."""
        elapsed, done = self._elapsed(), progress.done - self._done_before
        if not progress.total or done <= 0 or elapsed < _LEFT_AFTER_SECONDS:
            return ""
        return f"{duration(elapsed / done * (progress.total - progress.done))} left"

    def _say(self, progress: StepProgress) -> None:
        """For logs and pipes: a line for each phase and stage, and one now and then."""
        parts = (_amount(progress), progress.message or self._left(progress))
        line = ": ".join(filter(None, (_title(progress), ", ".join(filter(None, parts)))))
        stage = _NUMBERS.sub("", progress.message)
        now = self._clock()
        is_due = stage != self._stage or now - self._said_at >= _LINE_EVERY_SECONDS
        if line != self._said and is_due:
            self._console.print(line, markup=False, soft_wrap=True)
            self._said, self._stage, self._said_at = line, stage, now


class _ToConsole(logging.Handler):
    """Shows the product's warnings above the bar, not through it."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"! {record.getMessage()}", markup=False, soft_wrap=True)


def _title(progress: StepProgress) -> str:
    return _TITLES.get(progress.phase, progress.phase)


def _amount(progress: StepProgress) -> str:
    match progress.phase:
        case "fetching":
            return decimal(progress.done) if progress.done else ""
        case "loading":
            return ""  # parts of the engine's start are not parts of the whole
        case _:
            return f"{progress.done:,}/{progress.total:,}" if progress.total else ""
