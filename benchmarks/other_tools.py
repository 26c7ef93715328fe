"""Other tools at newer releases: short requests that share nothing, on a tiny model.

``run_batch`` of vLLM 0.32 and 0.33 on an engine of 0.32 (its file is Python, and no build of 0.33
for CPUs is needed), a plain client of ``vllm serve``, LiteLLM's ``batch_completion``, Daft's
``prompt``, saturate's ``pump`` and Ray Data LLM's processor of HTTP requests with their defaults on
``vllm serve``, and Batchyard. The tools are installed at first use, into ``build/other-tools``:
1.1 GB, and an archive of vLLM of 340 MB of which one file is kept. A tool that fails or does not
end has a row that says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.engine.vllm.vllm import SERVER_MODULE
from benchmarks import inputs
from benchmarks.other_tools_timed import DAFT, LITELLM, RAY, SATURATE, TOOLS
from benchmarks.overhead import NAMES as SHORT_NAMES
from benchmarks.overhead import engine_options
from benchmarks.timed import (
    ENGINE_ENVIRONMENT,
    ENGINE_PYTHON,
    HTTP_INSTALLED,
    OURS,
    ROOT,
    RUN_BATCH,
    TINY,
    Job,
    Timed,
    judged,
    median_rate,
    of_way,
    run_batch_program,
    run_jobs,
    run_with,
    spread,
)
from tests.services.prefect import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Outcome = list[Timed] | str
    """What each file took; or in a few words, why that is not known."""

FOLDER = ROOT / "build" / "other-tools"
NEWER_RUN_BATCH = str(FOLDER / "run_batch_0_33.py")
LIMIT_SECONDS = 120.0
"""For each file, with the start of the program."""
_PYTHON = FOLDER / "environment" / "bin" / "python"
_LISTS = ROOT / "benchmarks"
_IN_THE_ARCHIVE = "vllm/entrypoints/launchers/run_batch.py"
_START_SECONDS = 300.0
_STOP_SECONDS = 30.0
_ON_ENGINES = (RUN_BATCH, HTTP_INSTALLED, OURS)

NAMES = {
    RUN_BATCH: "`run_batch` of vLLM 0.32",
    NEWER_RUN_BATCH: "`run_batch` of vLLM 0.33, on the engine of 0.32",
    HTTP_INSTALLED: SHORT_NAMES[HTTP_INSTALLED],
    OURS: SHORT_NAMES[OURS],
    LITELLM: "LiteLLM, `batch_completion`, 100 threads",
    DAFT: "Daft, `prompt`, up to 1,000 connections",
    SATURATE: "saturate, `pump`, a window that adapts",
    RAY: "Ray Data LLM, HTTP requests, blocks of 64",
}


@dataclass(frozen=True)
class Size:
    """Of this size every tool answers its files."""

    requests: int = 1000
    files: int = 5


def install() -> None:
    """Fetch the tools, where they are not there yet. Exits if that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    marker = FOLDER / "installed.txt"
    pinned = (_LISTS / "other-tools.txt").read_text()
    if not marker.exists() or marker.read_text() != pinned:
        _pip_install(FOLDER / "environment", _LISTS / "other-tools.txt")
        marker.write_text(pinned)
    if not Path(NEWER_RUN_BATCH).exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as name:
            wanted = ["--no-deps", "--only-binary=:all:", f"--dest={name}"]
            _command(sys.executable, "-m", "pip", "download", *wanted, "-r", _LISTS / "newer.txt")
            (archive,) = Path(name).glob("vllm-*.whl")
            with zipfile.ZipFile(archive) as opened:
                Path(NEWER_RUN_BATCH).write_bytes(opened.read(_IN_THE_ARCHIVE))


def measure(size: Size | None = None) -> dict[str, Outcome]:
    """What came of each way, in the order of the table."""
    size = size or Size()
    install()
    options = engine_options(TINY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = str(inputs.short_requests(folder / "warm.jsonl", count=512, model=TINY, seed=99))
        files = [
            str(
                inputs.short_requests(
                    folder / f"{seed}.jsonl", count=size.requests, model=TINY, seed=seed
                )
            )
            for seed in range(size.files)
        ]
        jobs = [Job(way, file) for file in files for way in _ON_ENGINES]
        timed = run_jobs(jobs, options, warm_up=warm_up)
        newer = [Job(NEWER_RUN_BATCH, file) for file in files]
        found: dict[str, Outcome] = {
            RUN_BATCH: of_way(timed, RUN_BATCH),
            NEWER_RUN_BATCH: attempt(run_batch_program(), newer, options, warm_up),
            HTTP_INSTALLED: of_way(timed, HTTP_INSTALLED),
            OURS: of_way(timed, OURS),
        }
        with _serving() as url:
            part = inputs.first_lines(folder / "few.jsonl", of=Path(warm_up), count=100)
            return found | _clients(files, url, str(part))


def _clients(files: Sequence[str], url: str, warm_up: str) -> dict[str, Outcome]:
    """The tools in turns, each file in a process of its own until one is not answered."""
    program = [_PYTHON, ROOT / "benchmarks" / "other_tools_timed.py"]
    found: dict[str, Outcome] = {way: [] for way in TOOLS}
    for file in files:
        for way, before in found.items():
            if not isinstance(before, str):
                now = attempt(program, [Job(way, file)], [url, TINY], warm_up)
                found[way] = now if isinstance(now, str) else before + now
    return found


def attempt(
    program: Sequence[Any],
    jobs: Sequence[Job],
    options: Sequence[str],
    warm_up: str,
    *,
    limit_seconds: float = LIMIT_SECONDS,
) -> Outcome:
    """Give the jobs to a program that may fail, or not come to an end in ``limit_seconds`` each."""
    limit = limit_seconds * len(jobs)
    try:
        seconds = run_with(program, jobs, options, warm_up, limit_seconds=limit)
        return [judged(job, seconds[job]) for job in jobs]
    except subprocess.TimeoutExpired:
        return f"cut off after {limit:.0f} s"
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the others have their rows
        traceback.print_exc()
        return "failed"


def table(found: dict[str, Outcome]) -> str:
    ours, theirs = found[OURS], found[RUN_BATCH]
    assert not isinstance(ours, str)
    assert not isinstance(theirs, str)
    base = median_rate(theirs, RUN_BATCH)
    head = f"| {ours[0].requests:,} short requests | requests/s | of `run_batch` of vLLM 0.32 "
    lines = [head + "| spread |", "|---|---|---|---|"]
    for way, outcome in found.items():
        if isinstance(outcome, str):
            lines.append(f"| {NAMES[way]} | – | – | {outcome} |")
            continue
        rate = median_rate(outcome, way)
        ratio = f"{rate / base:.2f}×"
        lines.append(
            f"| {NAMES[way]} | {rate:.0f} | {f'**{ratio}**' if way == OURS else ratio} "
            f"| {100 * spread(outcome):.0f} % |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


@contextlib.contextmanager
def _serving() -> Iterator[str]:
    """``vllm serve`` with the options of the others, on a port of its own."""
    port = free_port()
    words = ["-m", SERVER_MODULE, "--host", "127.0.0.1", "--port", str(port)]
    with (FOLDER / "server.log").open("w") as log:
        server = subprocess.Popen(
            [ENGINE_PYTHON, *words, *engine_options(TINY)],
            env={**os.environ, **ENGINE_ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_healthy(url):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"vLLM's server did not start; see {log.name}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _pip_install(folder: Path, pinned: Path) -> None:
    _command(sys.executable, "-m", "venv", "--clear", folder)
    pip = folder / "bin" / "pip"
    _command(pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", pinned)


def _command(*words: str | Path) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    print(table(measure()))
