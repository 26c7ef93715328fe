"""The processor time of an engine's front end."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.processors import FrontEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE = """
import pathlib
pathlib.Path("/proc/self/comm").write_text("VLLM::EngineCore")
"""
COMPUTES = """
import sys
print(flush=True)
for line in sys.stdin:
    sum(range(20_000_000))
    print(flush=True)
"""


@contextmanager
def server(*, computes_in_core: bool) -> Iterator[subprocess.Popen[str]]:
    """A process with a child that is named as a core; each line lets one of the two compute."""
    core = f"{CORE}\n{COMPUTES if computes_in_core else ''}"
    front = "core.wait()" if computes_in_core else COMPUTES
    script = f"import subprocess, sys\ncore = subprocess.Popen([sys.executable, '-c', {core!r}])\n"
    with subprocess.Popen(
        [sys.executable, "-c", script + front],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def used(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    front_end = FrontEnd(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    seconds = front_end.seconds()
    process.stdin.close()
    return seconds


def test_what_the_front_end_computes_counts() -> None:
    with server(computes_in_core=False) as process:
        assert used(process) > 0.05


def test_what_the_core_computes_does_not() -> None:
    with server(computes_in_core=True) as process:
        assert used(process) < 0.05
