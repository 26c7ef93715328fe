"""Other tools at newer releases: short requests that share nothing, on a tiny model.

``run_batch`` of vLLM 0.32 and 0.33 on an engine of 0.32 (its file is Python, and no build of 0.33
for CPUs is needed), LiteLLM's ``batch_completion`` and Daft's ``prompt`` with their defaults on
``vllm serve``, and Batchyard. The tools are installed at first use, into ``build/other-tools``:
700 MB, and an archive of vLLM of 340 MB of which one file is kept.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import inputs
from benchmarks.other_tools_timed import DAFT, LITELLM
from benchmarks.overhead import engine_options
from benchmarks.timed import (
    ENGINE_ENVIRONMENT,
    ENGINE_PYTHON,
    OURS,
    ROOT,
    RUN_BATCH,
    TINY,
    Job,
    Timed,
    judged,
    median_rate,
    of_way,
    run_jobs,
    run_with,
    spread,
)
from tests.services.prefect import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = ROOT / "build" / "other-tools"
NEWER_RUN_BATCH = FOLDER / "run_batch_0_33.py"
_PYTHON = FOLDER / "environment" / "bin" / "python"
_LISTS = ROOT / "benchmarks"
_IN_THE_ARCHIVE = "vllm/entrypoints/launchers/run_batch.py"
_START_SECONDS = 300.0

NAMES = {
    RUN_BATCH: "`run_batch` of vLLM 0.32",
    str(NEWER_RUN_BATCH): "`run_batch` of vLLM 0.33, on the engine of 0.32",
    OURS: "Batchyard",
    LITELLM: "LiteLLM, `batch_completion`, 100 threads",
    DAFT: "Daft, `prompt`",
}


@dataclass(frozen=True)
class Size:
    """``part`` of each file is for the tools, whose rate is the same all the way."""

    requests: int = 5000
    part: int = 1000
    files: int = 3


def install() -> None:
    """Fetch the tools, where they are not there yet. Exits if that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not _PYTHON.exists():
        _pip_install(FOLDER / "environment", _LISTS / "other-tools.txt")
    if not NEWER_RUN_BATCH.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as name:
            wanted = ["--no-deps", "--only-binary=:all:", f"--dest={name}"]
            _command(sys.executable, "-m", "pip", "download", *wanted, "-r", _LISTS / "newer.txt")
            (archive,) = Path(name).glob("vllm-*.whl")
            with zipfile.ZipFile(archive) as opened:
                NEWER_RUN_BATCH.write_bytes(opened.read(_IN_THE_ARCHIVE))


def measure(size: Size | None = None) -> dict[str, list[Timed]]:
    """What each way took, in the order of the table; the tools have a part of each file."""
    size = size or Size()
    install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = inputs.short_requests(folder / "warm.jsonl", count=512, model=TINY, seed=99)
        jobs, parts = [], []
        for seed in range(size.files):
            path = folder / f"{seed}.jsonl"
            inputs.short_requests(path, count=size.requests, model=TINY, seed=seed)
            part = inputs.first_lines(folder / f"{seed}-part.jsonl", of=path, count=size.part)
            jobs += [Job(way, str(path)) for way in (RUN_BATCH, str(NEWER_RUN_BATCH), OURS)]
            parts += [Job(way, str(part)) for way in (LITELLM, DAFT)]
        timed = run_jobs(jobs, engine_options(TINY), warm_up=str(warm_up))
        with _serving() as url:
            script = ROOT / "benchmarks" / "other_tools_timed.py"
            seconds = run_with([_PYTHON, script], parts, [url, TINY], str(warm_up))
        timed += [judged(job, seconds[job]) for job in parts]
    return {way: of_way(timed, way) for way in NAMES}


def table(found: dict[str, list[Timed]]) -> str:
    requests = found[OURS][0].requests
    base = median_rate(found[RUN_BATCH], RUN_BATCH)
    lines = [
        f"| {requests:,} short requests | requests/s | of `run_batch` of vLLM 0.32 | spread |",
        "|---|---|---|---|",
    ]
    for way, timed in found.items():
        rate = median_rate(timed, way)
        ratio = f"{rate / base:.2f}×"
        lines.append(
            f"| {NAMES[way]} | {rate:.0f} | {f'**{ratio}**' if way == OURS else ratio} "
            f"| {100 * spread(timed):.0f} % |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


@contextlib.contextmanager
def _serving() -> Iterator[str]:
    """``vllm serve`` with the options of the others, on a port of its own."""
    port = free_port()
    words = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    with (FOLDER / "server.log").open("w") as log:
        server = subprocess.Popen(
            [ENGINE_PYTHON, *words, *engine_options(TINY)],
            env={**os.environ, **ENGINE_ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
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
