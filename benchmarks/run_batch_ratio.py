"""The whole pipeline against vLLM's own run_batch: the same files, engine options and run.

Two workloads: uniform short requests (what Batchyard costs), and shuffled questions on documents
under a small KV cache (what its order gains). Each side starts one engine per workload and is
timed without that start, on three files of the same shape; the ratio is that of the medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.inputs import document_questions, short_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / ".models" / "tiny-chat")
SMALL = str(ROOT / ".models" / "small-chat")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
FILES = 3
_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True)
class Workload:
    """``make`` writes the input file with the given seed."""

    name: str
    make: Callable[[Path, int], Path]
    engine_options: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Requests per second, each the median over the files; ``cached`` is our hit rate."""

    name: str
    run_batch: float
    ours: float
    spread: float
    cached: float

    @property
    def ratio(self) -> float:
        return self.ours / self.run_batch


_COMMON = (
    *("--max-num-batched-tokens", "4096", "--performance-mode", "throughput"),
    "--enable-prompt-tokens-details",
)

OVERHEAD = Workload(
    "5,000 short requests, nothing shared",
    lambda path, seed: short_requests(path, count=5000, model=TINY, seed=seed),
    ("--model", TINY, "--max-model-len", "1024", "--max-num-seqs", "256", *_COMMON),
)
PLAN_GAIN = Workload(
    "40 documents × 10 questions, shuffled, KV cache of 16,384 tokens",
    lambda path, seed: document_questions(
        path, documents=40, questions=10, words_each=300, model=SMALL, seed=seed
    ),
    (
        *("--model", SMALL, "--max-model-len", "2048", "--max-num-seqs", "32"),
        *("--block-size", "128", "--num-gpu-blocks-override", "128", *_COMMON),
    ),
)


def compare(workload: Workload, folder: Path) -> Comparison:
    """Run both sides on the same files."""
    files = [str(workload.make(folder / f"{n}.jsonl", n)) for n in range(FILES)]
    requests = Path(files[0]).read_bytes().count(b"\n")
    theirs = _run([ENGINE_PYTHON, ROOT / "benchmarks" / "run_batch_timed.py"], files, workload)
    ours = _run([sys.executable, "-m", "benchmarks.pipeline_timed"], files, workload)
    _check_equal_work(files)
    our_rates = [requests / ours[file]["seconds"] for file in files]
    their_rates = [requests / theirs[file] for file in files]
    return Comparison(
        workload.name,
        run_batch=statistics.median(their_rates),
        ours=statistics.median(our_rates),
        spread=max(_spread(our_rates), _spread(their_rates)),
        cached=statistics.median(ours[file]["cached"] for file in files),
    )


def _run(command: Sequence[Any], files: list[str], workload: Workload) -> dict[str, Any]:
    done = subprocess.run(
        [*map(str, command), *files, "--", *workload.engine_options],
        cwd=ROOT,
        env={**os.environ, **_ENGINE_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        sys.exit(f"{command[-1]} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(results[-1].removeprefix("RESULT ")))


def _check_equal_work(files: list[str]) -> None:
    """Both sides answered every request with as many tokens."""
    for file in files:
        theirs = _tokens(Path(f"{file}.run-batch-out"))
        ours = _tokens(Path(f"{file}.ours-out"))
        if theirs != ours:
            sys.exit(f"The two sides did not do the same work on {file}.")


def _tokens(path: Path) -> dict[str, int]:
    lines = map(json.loads, path.read_text().splitlines())
    return {
        line["custom_id"]: line["response"]["body"]["usage"]["completion_tokens"] for line in lines
    }


def _spread(rates: list[float]) -> float:
    return (max(rates) - min(rates)) / statistics.median(rates)


def main() -> None:
    for workload in (PLAN_GAIN, OVERHEAD):
        with tempfile.TemporaryDirectory() as folder:
            print(compare(workload, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
