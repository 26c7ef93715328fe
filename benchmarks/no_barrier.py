"""B2: many chunks cost nothing: heavy-tailed answers, chunk after chunk in one sliding window.

Compared with the same engine fed with everything in one window of the same size, with a plain
client of ``vllm serve``, and with loops that wait for the last request of each chunk. On a stub
engine whose latency is proportional to ``max_tokens``, where nothing else takes time, and on real
vLLM. The loops have the first requests of the file only, so what is compared is output tokens per
second.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.stub.stub import StubEngine
from benchmarks import inputs
from benchmarks.comparators import barriers, exchange, one_window
from benchmarks.plot import Bar, bars, save
from benchmarks.stub_services import MODEL, fetched_batch, run_chunks, stub_services
from benchmarks.timed import (
    COMMON_OPTIONS,
    HTTP_INSTALLED,
    OURS,
    STREAM_BARRIER,
    STREAM_WINDOW,
    TINY,
    Job,
    of_way,
    run_jobs,
)
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

STUB_SEQS, VLLM_SEQS = 32, 16
STUB_MEDIAN, STUB_MOST = 64, 1024
VLLM_MEDIAN, VLLM_MOST = 24, 256
SECONDS_PER_TOKEN = 0.001
CHUNK_REQUESTS = 128


@dataclass(frozen=True)
class Size:
    """``…_part`` requests of each file are for the loops with a barrier."""

    stub: int = 6000
    stub_part: int = 320
    vllm: int = 1500
    vllm_part: int = 160


@dataclass(frozen=True)
class Shares:
    """Output tokens per second, relative to one window; ``sizes``: loop's chunk → share."""

    engine: str
    requests: int
    window_tokens_per_second: float
    ours: float
    barriers: dict[int, float]
    naive: float | None = None
    """Of a plain client of ``vllm serve`` as it is installed; None: that engine is no server."""


def measure(size: Size | None = None, *, with_vllm: bool = True) -> list[Shares]:
    size = size or Size()
    found = [asyncio.run(_on_stub(size.stub, size.stub_part))]
    if with_vllm:
        found.append(on_vllm(size.vllm, size.vllm_part))
    return found


async def _on_stub(requests: int, part: int) -> Shares:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = inputs.heavy_tailed_requests(
            folder / "in.jsonl",
            count=requests,
            median_tokens=STUB_MEDIAN,
            most_tokens=STUB_MOST,
            model=MODEL,
            seed=1,
        )
        lines = map(json.loads, source.read_text().splitlines())
        bodies = [json.dumps(line["body"]).encode() for line in lines]
        ours = sum(map(_tokens, bodies)) / await _our_seconds(folder, source)
        window = await _token_rate(partial(one_window, size=2 * STUB_SEQS), bodies)
        looped = {
            chunk: await _token_rate(partial(barriers, size=chunk), bodies[:part])
            for chunk in (STUB_SEQS, 10, 4)
        }
    shares = {chunk: rate / window for chunk, rate in looped.items()}
    return Shares("stub engine", requests, window, ours / window, shares)


async def _our_seconds(folder: Path, source: Path) -> float:
    """From the plan to the last chunk that is done."""
    async with stub_services(folder / "home", _stub(), chunk_requests=CHUNK_REQUESTS) as services:
        batch_id = await fetched_batch(services, source)
        await prepare_batch(services, batch_id)
        began = time.perf_counter()
        await run_chunks(services, MODEL, batch_id=batch_id)
        seconds = time.perf_counter() - began
        assert (await services.store.chunks.summary(batch_id)).pending == 0
        return seconds


async def _token_rate(way: Callable[..., Awaitable[list[bytes]]], bodies: Sequence[bytes]) -> float:
    engine = _stub()
    await engine.start()
    async with exchange(engine) as send:
        began = time.perf_counter()
        await way(send, bodies)
        seconds = time.perf_counter() - began
    return sum(map(_tokens, bodies)) / seconds


def _stub() -> StubEngine:
    return StubEngine(
        MODEL,
        max_num_seqs=STUB_SEQS,
        latency=lambda body: SECONDS_PER_TOKEN * _tokens(body),
        keep_log=False,
    )


def _tokens(body: bytes) -> int:
    found = re.search(rb'"max_tokens": ?(\d+)', body)
    assert found is not None
    return int(found[1])


def on_vllm(
    requests: int,
    part: int,
    *,
    model: str = TINY,
    sequences: int = VLLM_SEQS,
    options: Sequence[str] = (),
) -> Shares:
    """``options``: further ones of the engines."""
    make = partial(
        inputs.heavy_tailed_requests,
        median_tokens=VLLM_MEDIAN,
        most_tokens=VLLM_MOST,
        model=model,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = make(folder / "warm.jsonl", count=32, seed=99)
        whole = make(folder / "in.jsonl", count=requests, seed=1)
        first = inputs.first_lines(folder / "part.jsonl", of=whole, count=part)
        chunks = (sequences, 10, 4)
        jobs = [Job(way, str(whole)) for way in (STREAM_WINDOW, HTTP_INSTALLED, OURS)]
        jobs += [Job(f"{STREAM_BARRIER}{chunk}", str(first)) for chunk in chunks]
        options = (
            *("--model", model, "--max-model-len", "1024", "--max-num-seqs", str(sequences)),
            *COMMON_OPTIONS,
            *options,
        )
        timed = run_jobs(jobs, options, warm_up=str(warm_up))
    rates = {one.job.way: one.token_rate for one in timed}
    window = rates[STREAM_WINDOW]
    shares = {chunk: rates[f"{STREAM_BARRIER}{chunk}"] / window for chunk in chunks}
    assert len(of_way(timed, OURS)) == 1
    naive = rates[HTTP_INSTALLED] / window
    return Shares("vLLM", requests, window, rates[OURS] / window, shares, naive)


def table(found: list[Shares]) -> str:
    lines = [
        "| share of one window's output tokens per second | "
        + " | ".join(f"{each.engine}, {each.requests:,} requests" for each in found)
        + " |",
        "|---|" + "---|" * len(found),
        "| Batchyard, in chunks | "
        + " | ".join(f"**{100 * each.ours:.0f} %**" for each in found)
        + " |",
        "| plain aiohttp client, as many in flight, `vllm serve` | "
        + " | ".join("–" if each.naive is None else f"{100 * each.naive:.0f} %" for each in found)
        + " |",
    ]
    for position, name in enumerate(("as large as `max_num_seqs`", "of 10", "of 4")):
        shares = [list(each.barriers.values())[position] for each in found]
        cells = " | ".join(f"{100 * share:.0f} %" for share in shares)
        lines.append(f"| loop over chunks {name} | {cells} |")
    return "\n".join(lines)


def section() -> str:
    """Measure, draw, and return what the page is to say."""
    found = measure()
    rows = []
    for each in found:
        rows += [
            Bar(each.engine, "one window", 100.0),
            Bar(each.engine, "Batchyard", 100 * each.ours, is_ours=True),
        ]
        if each.naive is not None:
            rows.append(Bar(each.engine, "plain client", 100 * each.naive))
        rows += [
            Bar(each.engine, f"loop over chunks of {chunk}", 100 * share)
            for chunk, share in each.barriers.items()
        ]
    title = "Output tokens per second, heavy-tailed answers, one window = 100"
    picture = save("no_barrier", bars(title, rows, unit=" %"))
    return f"{table(found)}\n\n{picture}"


if __name__ == "__main__":
    print(table(measure()))
