"""What the progress display writes, to a terminal and to a file."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from batchyard.cli.terminal.progress import ProgressDisplay
from batchyard.services.services import Progress
from tests.cli.screen import drawn


def written_by(*steps: Progress, terminal: bool = False, fails: bool = False) -> list[str]:
    """The lines that a display leaves in a file or on a screen."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    with ProgressDisplay(console=console) as display:
        for step in steps:
            display(step)
        if fails:
            display.fail()
    if terminal:
        return [line for line in drawn(out.getvalue().replace("\n", "\r\n")) if line]
    return out.getvalue().splitlines()


def test_a_file_gets_a_line_for_each_phase() -> None:
    """And for what was counted, the number at the end."""
    assert written_by(
        Progress("b", "fetching"),
        Progress("b", "fetching", 2_000_000),
        Progress("b", "running", 0, 3),
        Progress("b", "running", 2, 3),
        Progress("b", "running", 3, 3),
    ) == [
        "Fetching the input",
        "Running requests: 0/3",
        "✓ Running requests         0 s  3/3",
    ]


def test_a_file_gets_a_line_for_each_stage_of_the_engines_start() -> None:
    """Numbers alone are no new stage."""
    assert written_by(
        Progress("b", "loading", message="starting vLLM"),
        Progress("b", "loading", 25, 100, "loading weights 1/4"),
        Progress("b", "loading", 50, 100, "loading weights 2/4"),
        Progress("b", "loading", message="warming up"),
    ) == [
        "Loading the model: starting vLLM",
        "Loading the model: loading weights 1/4",
        "Loading the model: warming up",
    ]


def test_a_file_gets_a_line_now_and_then() -> None:
    """With the time that is left, at the pace so far."""
    now = 0
    out = io.StringIO()
    console = Console(file=out, width=100)
    with ProgressDisplay(console=console, clock=lambda: float(now)) as display:
        for now in (0, 10, 31, 40):
            display(Progress("b", "running", now, 1_000))
    assert out.getvalue().splitlines() == [
        "Running requests: 0/1,000",
        "Running requests: 31/1,000, 16 min 9 s left",
        "✓ Running requests         40 s  40/1,000",
    ]


def test_a_failed_phase_has_a_cross() -> None:
    """And only that one."""
    lines = written_by(Progress("b", "fetching"), Progress("b", "validating"), fails=True)
    assert lines == [
        "Fetching the input",
        "Validating and planning",
        "✗ Validating and planning  0 s",
    ]


def test_an_exception_ends_the_phase_as_failed() -> None:
    """Whatever it is, Ctrl-C too."""
    out = io.StringIO()
    display = ProgressDisplay(console=Console(file=out, width=100))
    with pytest.raises(KeyboardInterrupt), display:
        _interrupted(display)
    assert out.getvalue().splitlines()[-1] == "✗ Loading the model        0 s"


def _interrupted(display: ProgressDisplay) -> None:
    display(Progress("b", "loading"))
    raise KeyboardInterrupt


def test_a_terminal_keeps_a_line_of_each_phase() -> None:
    """The bar is drawn in place and taken away."""
    lines = written_by(
        Progress("b", "loading", 25, 100, "loading weights 1/4"),
        Progress("b", "running", 3, 3),
        terminal=True,
    )
    assert lines == [
        "✓ Loading the model        0 s",
        "✓ Running requests         0 s  3/3",
    ]


def test_warnings_of_the_product_are_shown() -> None:
    """An engine that is started again is something that a person wants to know."""
    out = io.StringIO()
    with ProgressDisplay(console=Console(file=out, width=100)):
        logging.getLogger("batchyard.runner.window.window").warning(
            "engine lost: %s", "exit code 1"
        )
        logging.getLogger("batchyard.runner.window.window").info("not this")
    logging.getLogger("batchyard.runner.window.window").warning("nor this")
    assert out.getvalue() == "! engine lost: exit code 1\n"
