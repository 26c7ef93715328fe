"""Servers that a command has started: a slow one is waited for, one that hangs is not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from batchyard.processes.guarded_process import GuardedProcess
from commands import first_answer as module
from commands.first_answer import first_answer
from tests.patience import PATIENCE
from tests.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[[str], tuple[GuardedProcess, str]]

SERVE = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status})
        self.end_headers()
HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
BUSY_SECONDS = 4.0
IDLE_SECONDS = 1.5


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs a program in which ``{port}`` is the port of the URL."""
    monkeypatch.setattr(module, "_IDLE_SECONDS", IDLE_SECONDS * PATIENCE)
    started = []

    def start_it(text: str) -> tuple[GuardedProcess, str]:
        (port,) = free_ports(1)
        with (tmp_path / "log").open("wb") as log:
            words = [sys.executable, "-c", text.replace("{port}", str(port))]
            started.append(GuardedProcess(words, environment={}, log=log))
        return started[-1], f"http://127.0.0.1:{port}/"

    yield start_it
    for program in started:
        program.close(0)


def ignored(_: str) -> None:
    """For a test that is not about what is said."""


async def test_a_server_that_computes_is_waited_for_and_that_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAID_AFTER_SECONDS", 1.0)
    said: list[str] = []
    busy = f"import time\nend = time.monotonic() + {BUSY_SECONDS * PATIENCE}\n"
    busy += "while time.monotonic() < end: pass\n"
    program, url = start(busy + SERVE.replace("{status}", "200"))
    assert await first_answer(program, url, said.append)
    assert said[0] == ""
    assert any(each.startswith("no answer yet after ") for each in said)


async def test_a_server_that_hangs_is_not_waited_for(start: Start) -> None:
    program, url = start("import time\ntime.sleep(3600)")
    assert not await first_answer(program, url, ignored)
    assert program.exit_code is None


async def test_nothing_is_expected_of_a_program_that_has_ended(start: Start) -> None:
    assert not await first_answer(*start("raise SystemExit(1)"), ignored)


@pytest.mark.parametrize(("status", "is_answer"), [(401, True), (503, False)])
async def test_a_server_that_asks_for_a_key_is_there(
    start: Start, monkeypatch: pytest.MonkeyPatch, status: int, is_answer: bool
) -> None:
    """And one that says that it is not ready is not, for however long it says so."""
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 5.0 * PATIENCE)
    program, url = start(SERVE.replace("{status}", str(status)))
    assert await first_answer(program, url, ignored) is is_answer
