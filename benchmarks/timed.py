"""What is timed on real vLLM: jobs, and what came of them.

A job is a way to answer a file. Jobs on one engine run one after the other, in the order in which
they are given, each with an empty prefix cache; the engine's start is in nobody's time.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / ".models" / "tiny-chat")
SMALL = str(ROOT / ".models" / "small-chat")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
_RUN_BATCH = ROOT / "benchmarks" / "run_batch_timed.py"

RUN_BATCH = "run_batch"
RUN_BATCH_TUNED = "run_batch-tuned"
"""In the engine environment as Batchyard makes it, with its ``.pth`` files."""
OURS = "batchyard"
OURS_INPUT_ORDER = "batchyard-input-order"
HTTP_WINDOW = "http-window"
HTTP_BARRIER = "http-barrier-"
STREAM_WINDOW = "stream-window"
STREAM_BARRIER = "stream-barrier-"

COMMON_OPTIONS = (
    *("--max-num-batched-tokens", "4096", "--performance-mode", "throughput"),
    "--enable-prompt-tokens-details",
)
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # It has the route that empties the prefix cache.
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True)
class Job:
    """``way`` is one of the names above; a barrier's ends in how many requests it waits for.

    A path that ends in ``.py`` is the file with the ``run_batch`` of another release.
    """

    way: str
    file: str

    @property
    def output(self) -> str:
        return f"{self.file}.{Path(self.way).name}.out"


@dataclass(frozen=True)
class Timed:
    """What a job took."""

    job: Job
    seconds: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def token_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def cached(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


def run_jobs(jobs: Sequence[Job], options: Sequence[str], *, warm_up: str) -> list[Timed]:
    """Run what is ``run_batch``'s on an engine of its own, then the rest on one like it.

    ``warm_up`` is a file that each engine answers first, untimed, in each way. Exits if anybody
    left a request unanswered or answered it with fewer tokens than it asked for.
    """
    ours = (sys.executable, "-m", "benchmarks.serve_timed")
    programs = {RUN_BATCH: run_batch_program(), RUN_BATCH_TUNED: (ENGINE_PYTHON, _RUN_BATCH)}
    seconds: dict[Job, float] = {}
    for program in (*programs.values(), ours):
        some = [job for job in jobs if programs.get(job.way, ours) == program]
        if some:
            seconds |= run_with(program, some, options, warm_up)
    return [judged(job, seconds[job]) for job in jobs]


def run_batch_program() -> tuple[Any, ...]:
    """The command of ``run_batch`` on vLLM as it is installed.

    ``-S`` leaves our ``.pth`` files unread (decision 2), also in the processes it starts.
    """
    if not is_environment_tuned():
        return (ENGINE_PYTHON, _RUN_BATCH)
    packages = _packages()
    return ("env", f"PYTHONPATH={packages}", ENGINE_PYTHON, "-S", _RUN_BATCH)


def is_environment_tuned() -> bool:
    """Whether the engine environment has ``.pth`` files of Batchyard: that of a GPU has none."""
    return any(_packages().glob("*-cpu.pth"))


def _packages() -> Path:
    (packages,) = ENGINE_PYTHON.parents[1].glob("lib/python*/site-packages")
    return packages


def cache_ceilings(files: Sequence[str], *, model: str, block_size: int) -> list[float]:
    """The hit rate of each file with an endless cache; see :mod:`benchmarks.cache_ceiling`."""
    script = str(ROOT / "benchmarks" / "cache_ceiling.py")
    command = [str(ENGINE_PYTHON), script, model, str(block_size), *files]
    return list(_result_of(command))


def facts_of(model: str, file: str) -> dict[str, Any]:
    """The engine's ``vllm``, ``torch`` and ``device`` (None: no GPU); ``tokens`` of a prompt."""
    script = str(ROOT / "benchmarks" / "model_facts.py")
    return dict(_result_of([str(ENGINE_PYTHON), script, model, file]))


def run_with(
    command: Sequence[Any],
    jobs: Sequence[Job],
    options: Sequence[str],
    warm_up: str,
    *,
    limit_seconds: float | None = None,
) -> dict[Job, float]:
    """The seconds of each job, as a program prints them that is given jobs and options.

    Raises ``TimeoutExpired`` if the program has not ended in ``limit_seconds``; then it is killed.
    """
    ways = dict.fromkeys(job.way for job in jobs)
    every = [*(Job(way, warm_up) for way in ways), *jobs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps([[job.way, job.file, job.output] for job in every]))
        seconds = _result_of([*map(str, command), str(path), *options], limit_seconds)
    return dict(zip(jobs, seconds[len(ways) :], strict=True))


def _result_of(command: Sequence[str], limit_seconds: float | None = None) -> Any:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENGINE_ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=limit_seconds is not None,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_seconds)
        except BaseException:
            if limit_seconds is not None:
                # With its engine: an interrupt from the keyboard does not reach them.
                os.killpg(process.pid, signal.SIGKILL)
            raise
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not results:
        sys.exit(f"{' '.join(command)[:300]} failed:\n{errors[-3000:]}")
    return json.loads(results[-1].removeprefix("RESULT "))


def judged(job: Job, seconds: float) -> Timed:
    asked = {line["custom_id"]: line["body"]["max_tokens"] for line in _lines(job.file)}
    usages = {line["custom_id"]: line["response"]["body"]["usage"] for line in _lines(job.output)}
    if {name: usage["completion_tokens"] for name, usage in usages.items()} != asked:
        sys.exit(f"{job.way} did not do all the work of {job.file}.")
    return Timed(
        job,
        seconds,
        requests=len(asked),
        output_tokens=sum(asked.values()),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages.values()),
        cached_tokens=sum(map(_cached_tokens, usages.values())),
    )


def _cached_tokens(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _lines(path: str) -> Iterable[dict[str, Any]]:
    with Path(path).open() as file:
        yield from map(json.loads, file)


def of_way(timed: Iterable[Timed], way: str) -> list[Timed]:
    return [one for one in timed if one.job.way == way]


def median_rate(timed: Iterable[Timed], way: str) -> float:
    return statistics.median(one.rate for one in of_way(timed, way))


def spread(timed: Iterable[Timed]) -> float:
    """The range of the rates over their median, of the way for which it is largest."""
    rates: dict[str, list[float]] = {}
    for one in timed:
        rates.setdefault(one.job.way, []).append(one.rate)
    return max((max(each) - min(each)) / statistics.median(each) for each in rates.values())
