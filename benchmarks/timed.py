"""What is timed on real vLLM: jobs, and what came of them.

A job is a way to answer a file. Jobs run one after the other, in the order in which they are
given, each with an empty prefix cache; the engine's start is in nobody's time. On the CPU the order
holds across engines too: whatever the machine does meanwhile, it does to all of them. A GPU's
memory holds one engine at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from batchyard.engine.vllm.vllm import SERVERS_SCRIPT
from batchyard.engine.vllm.vllm_options import EngineOptions, api_servers
from batchyard.processes.guardian import signal_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Command = tuple[Any, ...]

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / ".models" / "tiny-chat")
SMALL = str(ROOT / ".models" / "small-chat")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
_RUN_BATCH = ROOT / "benchmarks" / "run_batch_timed.py"
_SERVE = ("-m", "vllm.entrypoints.launchers.api_server.entry")

RUN_BATCH = "run_batch"
RUN_BATCH_TUNED = "run_batch-tuned"
"""In the engine environment as Batchyard makes it, with its ``.pth`` files."""
OURS = "batchyard"
OURS_ONE_SERVER = "batchyard-one-server"
"""With one API server, where the engine would get several."""
OURS_INPUT_ORDER = "batchyard-input-order"
HTTP_WINDOW = "http-window"
HTTP_INSTALLED = "http-window-installed"
"""The same client, and ``vllm serve`` as it is installed."""
HTTP_SEVERAL = "http-window-several"
"""The same with as many API servers as Batchyard's engine gets of its own accord."""
HTTP_RUST = "http-window-rust"
"""The same with vLLM's front end in Rust, where the engine environment has it."""
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
ONE_SERVER = "--one-server"
_USE_RUST, _RUST_PATH = "VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH"
_SECONDS = "SECONDS "
_SETTLE_SECONDS = 1.0
"""For what is due when a program goes on: connections that are too old, a look at the database."""


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


class Used(NamedTuple):
    """What a program prints of a job."""

    seconds: float
    front_end_seconds: float = 0.0
    """Processor time of the engine's processes that read requests and write answers; 0: unknown."""


@dataclass(frozen=True)
class Timed:
    """What a job took."""

    job: Job
    seconds: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    front_end_seconds: float = 0.0
    """As in :class:`Used`."""

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
    """Run what is ``run_batch``'s on an engine of its own, and the rest on one like it.

    ``warm_up`` is a file that each engine answers first, untimed, in each way. Exits if anybody
    left a request unanswered or answered it with fewer tokens than it asked for.
    """
    ours = (sys.executable, "-m", "benchmarks.serve_timed")
    naive = (sys.executable, "-m", "benchmarks.naive_timed")
    one, several = (
        # -P: the script's neighbour vllm.py is no vLLM.
        as_installed("-P", SERVERS_SCRIPT, "--api-server-count", count)
        for count in (1, servers_of(options))
    )
    commands: dict[str, Command] = {
        RUN_BATCH: run_batch_program(),
        RUN_BATCH_TUNED: (ENGINE_PYTHON, _RUN_BATCH),
        HTTP_INSTALLED: (*naive, *as_installed(*_SERVE), "--"),
        HTTP_SEVERAL: (*naive, *several, "--"),
        HTTP_RUST: (*naive, "env", f"{_USE_RUST}=1", *one, "--"),
        OURS_ONE_SERVER: (*ours, ONE_SERVER),
    }
    shares: dict[Command, list[Job]] = {}
    for job in jobs:
        shares.setdefault(commands.get(job.way, ours), []).append(job)
    if is_environment_tuned():
        seconds = in_turns(shares, jobs, options, warm_up)
    else:
        seconds = {}
        for command, some in shares.items():
            seconds |= run_with(command, some, options, warm_up)
    return [judged(job, seconds[job]) for job in jobs]


def servers_of(options: Sequence[str]) -> int:
    """How many API servers an engine of ours has with these options on this machine."""
    cores = len(os.sched_getaffinity(0))
    return api_servers(EngineOptions(options), os.environ, cores)


def has_rust_front_end() -> bool:
    """Whether the engine environment's vLLM has the front end in Rust: its CUDA wheels do.

    A path in vLLM's own variable counts too; vLLM takes what it finds there.
    """
    return _RUST_PATH in os.environ or (_packages() / "vllm" / "vllm-rs").is_file()


def run_batch_program() -> Command:
    """The command of ``run_batch`` on vLLM as it is installed."""
    return as_installed(_RUN_BATCH)


def as_installed(*words: Any) -> Command:
    """The command of a program of the engine environment, with vLLM as it is installed.

    ``-S`` leaves our ``.pth`` files unread (decision 2), also in the processes it starts.
    """
    if not is_environment_tuned():
        return (ENGINE_PYTHON, *words)
    return ("env", f"PYTHONPATH={_packages()}", ENGINE_PYTHON, "-S", *words)


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
) -> dict[Job, Used]:
    """The seconds of each job, as a program prints them that is given jobs and options.

    Raises ``TimeoutExpired`` if the program has not ended in ``limit_seconds``; then it is killed.
    """
    with _command_for(command, jobs, options, warm_up) as words:
        seconds = _printed_by(words, _SECONDS, limit_seconds)[len(_ways(jobs)) :]
    return dict(zip(jobs, map(_used, seconds), strict=True))


def in_turns(
    shares: dict[Command, list[Job]], order: Sequence[Job], options: Sequence[str], warm_up: str
) -> dict[Job, Used]:
    """The seconds of each job, one at a time in ``order``; ``shares`` are those of each program.

    The programs are started together and wait for their turns. Exits if one of them fails.
    """
    with contextlib.ExitStack() as stack:
        turns = {
            command: stack.enter_context(_taking_turns(command, some, options, warm_up))
            for command, some in shares.items()
        }
        for command, some in shares.items():
            for _ in _ways(some):
                turns[command]()
        whose = {job: command for command, some in shares.items() for job in some}
        return {job: turns[whose[job]]() for job in order}


@contextlib.contextmanager
def _taking_turns(
    command: Command, jobs: Sequence[Job], options: Sequence[str], warm_up: str
) -> Iterator[Callable[[], Used]]:
    """Start a program; each call lets it answer its next file, and returns the seconds of it.

    From one call to the next it stands still, with all that it has started: engines spin for a
    while after their last request, and servers look for work.
    """
    with (
        _command_for(command, jobs, options, warm_up) as words,
        tempfile.TemporaryFile("w+") as errors,
        _started(words, stdin=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin.fileno(), process.stdout

        def turn() -> Used:
            _tell(process.pid, signal.SIGCONT)
            time.sleep(_SETTLE_SECONDS)
            with contextlib.suppress(BrokenPipeError):
                os.write(asked, b"\n")
            while not (line := told.readline()).startswith(_SECONDS):
                if not line:
                    errors.seek(0)
                    _fail(words, errors.read())
            _tell(process.pid, signal.SIGSTOP)
            return _used(line.removeprefix(_SECONDS))

        try:
            yield turn
        finally:
            _tell(process.pid, signal.SIGCONT)


def _tell(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to all that it has started, and these."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, number)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                _tell(int(child), number)


@contextlib.contextmanager
def _command_for(
    command: Sequence[Any], jobs: Sequence[Job], options: Sequence[str], warm_up: str
) -> Iterator[list[str]]:
    """With a file of its jobs, those to warm up first: one for each way."""
    every = [*(Job(way, warm_up) for way in _ways(jobs)), *jobs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps([[job.way, job.file, job.output] for job in every]))
        yield [*map(str, command), str(path), *options]


def _ways(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(job.way for job in jobs))


def _result_of(command: Sequence[str]) -> Any:
    return json.loads(_printed_by(command, "RESULT ")[-1])


def _printed_by(command: Sequence[str], mark: str, limit_seconds: float | None = None) -> list[str]:
    """What follows the mark in the lines that begin with it. Exits if there is none."""
    with _started(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=limit_seconds)
    found = [line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)]
    if not found:
        _fail(command, errors)
    return found


@contextlib.contextmanager
def _started(
    command: Sequence[str], *, stdin: int, stderr: int | IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, which is killed with its engine if the block is left by an error."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENGINE_ENVIRONMENT},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            signal_group(process.pid, signal.SIGKILL)
            raise


def _fail(command: Sequence[str], errors: str) -> NoReturn:
    sys.exit(f"{' '.join(command)[:300]} failed:\n{errors[-3000:]}")


def judged(job: Job, used: Used) -> Timed:
    asked = {line["custom_id"]: line["body"]["max_tokens"] for line in _lines(job.file)}
    usages = {line["custom_id"]: line["response"]["body"]["usage"] for line in _lines(job.output)}
    if {name: usage["completion_tokens"] for name, usage in usages.items()} != asked:
        sys.exit(f"{job.way} did not do all the work of {job.file}.")
    return Timed(
        job,
        used.seconds,
        requests=len(asked),
        output_tokens=sum(asked.values()),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages.values()),
        cached_tokens=sum(map(_cached_tokens, usages.values())),
        front_end_seconds=used.front_end_seconds,
    )


def _used(words: str) -> Used:
    return Used(*map(float, words.split()))


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
