"""B3: what stands around the engine: uniform short requests that share nothing, on a tiny model.

The whole pipeline against vLLM's own ``run_batch``, our line stream with nothing around it, a plain
aiohttp client with the same window, and loops that wait for each chunk of ten or four. These have
the first lines of each file only: their rate is the same all the way, and they would take minutes.
``run_batch`` runs as vLLM is installed, and once more in Batchyard's engine environment where that
is another one: on the CPU. The same client has a row for several API servers where the machine has
the cores for them, and one for vLLM's front end in Rust where its wheel has that.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import inputs
from benchmarks.plot import Bar, bars, save
from benchmarks.timed import (
    COMMON_OPTIONS,
    HTTP_BARRIER,
    HTTP_INSTALLED,
    HTTP_RUST,
    HTTP_SEVERAL,
    HTTP_WINDOW,
    OURS,
    OURS_ONE_SERVER,
    RUN_BATCH,
    RUN_BATCH_TUNED,
    STREAM_WINDOW,
    TINY,
    Job,
    has_rust_front_end,
    is_environment_tuned,
    median_rate,
    of_way,
    run_jobs,
    servers_of,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.timed import Timed

MAX_NUM_SEQS = 256
_FRONT = "front end, processor seconds per 1,000"
BARRIER_10, BARRIER_4 = f"{HTTP_BARRIER}10", f"{HTTP_BARRIER}4"
NAMES = {
    RUN_BATCH: "`run_batch`",
    RUN_BATCH_TUNED: "`run_batch` in Batchyard's engine environment",
    OURS_ONE_SERVER: "Batchyard, one API server",
    OURS: "Batchyard",
    STREAM_WINDOW: "one window over the line stream, nothing kept",
    HTTP_INSTALLED: f"plain aiohttp client, {2 * MAX_NUM_SEQS} in flight, `vllm serve`",
    HTTP_SEVERAL: "the same with as many API servers as Batchyard",
    HTTP_RUST: "the same with vLLM's front end in Rust",
    HTTP_WINDOW: "the same in Batchyard's engine environment, with its middleware",
    BARRIER_10: "loop over chunks of 10",
    BARRIER_4: "loop over chunks of 4",
}


@dataclass(frozen=True)
class Size:
    """``barrier_requests`` of each file are for the loops with a barrier."""

    requests: int = 5000
    barrier_requests: int = 300
    files: int = 3


@dataclass(frozen=True)
class Rates:
    """Requests per second of each way, medians over the files, and each way's spread.

    ``front_ends``: processor seconds of the engine's front end for 1,000 requests, medians too.
    ``to_naive``: our rate to that of the plain client, file by file.
    """

    requests: int
    rates: dict[str, float]
    spreads: dict[str, float]
    front_ends: dict[str, float] = field(default_factory=dict)
    to_naive: tuple[float, ...] = ()

    def ratio(self, way: str) -> float:
        return self.rates[way] / self.rates[RUN_BATCH]


def engine_options(model: str) -> tuple[str, ...]:
    """Those of every engine that is compared."""
    limits = ("--max-model-len", "1024", "--max-num-seqs", str(MAX_NUM_SEQS))
    return ("--model", model, *limits, *COMMON_OPTIONS)


def measure(size: Size | None = None, *, model: str = TINY, options: Sequence[str] = ()) -> Rates:
    """``options``: further ones of the engines."""
    size = size or Size()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = inputs.short_requests(folder / "warm.jsonl", count=512, model=model, seed=99)
        jobs: list[Job] = []
        theirs = (RUN_BATCH, RUN_BATCH_TUNED) if is_environment_tuned() else (RUN_BATCH,)
        several = (HTTP_SEVERAL, OURS_ONE_SERVER) if servers_of(options) > 1 else ()
        rust = (HTTP_RUST,) if has_rust_front_end() else ()
        whole = (*theirs, HTTP_INSTALLED, *several, *rust, OURS, STREAM_WINDOW, HTTP_WINDOW)
        for seed in range(size.files):
            path = folder / f"{seed}.jsonl"
            inputs.short_requests(path, count=size.requests, model=model, seed=seed)
            part = inputs.first_lines(
                folder / f"{seed}-part.jsonl", of=path, count=size.barrier_requests
            )
            jobs += [Job(way, str(path)) for way in whole]
            jobs += [Job(way, str(part)) for way in (BARRIER_10, BARRIER_4)]
        timed = run_jobs(jobs, (*engine_options(model), *options), warm_up=str(warm_up))
    ways = [way for way in NAMES if of_way(timed, way)]
    return Rates(
        size.requests,
        rates={way: median_rate(timed, way) for way in ways},
        spreads={way: spread(of_way(timed, way)) for way in ways},
        front_ends={way: _front_end(of_way(timed, way)) for way in ways},
        to_naive=tuple(
            ours.rate / naive.rate
            for ours, naive in zip(of_way(timed, OURS), of_way(timed, HTTP_INSTALLED), strict=True)
        ),
    )


def _front_end(timed: Sequence[Timed]) -> float:
    return statistics.median(1000 * one.front_end_seconds / one.requests for one in timed)


def table(found: Rates) -> str:
    lines = [
        f"| {found.requests:,} short requests | requests/s | of `run_batch` | spread | {_FRONT} |",
        "|---|---|---|---|---|",
    ]
    for way in found.rates:
        ratio = f"{found.ratio(way):.2f}×"
        lines.append(
            f"| {NAMES[way]} | {found.rates[way]:.0f} | {f'**{ratio}**' if way == OURS else ratio} "
            f"| {100 * found.spreads[way]:.0f} % | {found.front_ends.get(way, 0):.2f} |"
        )
    if found.to_naive:
        each = ", ".join(f"{ratio:.2f}×" for ratio in found.to_naive)
        lines.append(f"\nBatchyard to the plain client on `vllm serve`, file by file: {each}.")
    return "\n".join(lines)


def section() -> str:
    """Measure, draw, and return what the page is to say."""
    found = measure()
    rows = [
        Bar("", NAMES[way].replace("`", ""), rate, is_ours=way == OURS)
        for way, rate in found.rates.items()
    ]
    picture = save("overhead", bars("Requests per second, short requests", rows))
    return f"{table(found)}\n\n{picture}"


if __name__ == "__main__":
    print(table(measure()))
