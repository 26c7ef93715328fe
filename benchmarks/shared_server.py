"""A batch beside the users of a live server: what they wait for, and what the batch gets.

One vLLM with 32 seats. Users send streaming chats at random moments, whether or not those before
are answered. First they are alone; then beside a batch that fills the server, as on one that
nobody else uses; then beside a batch that takes half of the seats and waits while the queue is not
empty; then beside one with an objective for the users' first tokens. A first token that has
not come when a phase ends counts with the time until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from batchyard.engine.objective import Objective
from batchyard.engine.remote.remote import RemoteEngine
from benchmarks import inputs
from benchmarks.comparators import URL
from benchmarks.open_engine import OpenEngine
from benchmarks.stub_services import fetched_batch, run_chunks, stub_services
from benchmarks.timed import ENGINE_PYTHON, SMALL
from tests.lifecycle import prepare_batch

SEATS = 32
CHATS_PER_SECOND = 1.5
LIVE_WORDS, LIVE_TOKENS = 20, 24
BATCH_WORDS, BATCH_TOKENS = 120, 48
BATCH_REQUESTS = 6000
FIRST_TOKEN_SECONDS = 0.25
"""The objective, for p99."""
_WARM_SECONDS = 5.0
_MODEL = "small-chat"
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{.*\} ([-+.e\d]+)$", re.MULTILINE)


@dataclass
class Live:
    """What the users of one phase saw."""

    first_token_seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    def quantile(self, part: float) -> float:
        return statistics.quantiles(self.first_token_seconds, n=100, method="inclusive")[
            round(part * 100) - 1
        ]


@dataclass(frozen=True)
class Phase:
    """Milliseconds until the first token, of the users; tokens per second, of the batch."""

    name: str
    first_p50: float
    first_p99: float
    batch_rate: float


async def _generated(server: OpenEngine) -> float:
    """Output tokens since its start."""
    return sum(map(float, _GENERATED.findall(await server.metrics())))


async def _chat(server: OpenEngine, text: str, live: Live) -> None:
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": LIVE_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    waited: float | None = None
    try:
        async with (
            server.http() as session,
            session.post(URL, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {") and b'"content":"' in line.replace(b" ", b""):
                    waited = waited or time.perf_counter() - began
                    live.tokens += 1
    finally:
        live.first_token_seconds.append(waited or time.perf_counter() - began)


async def _use(server: OpenEngine, live: Live, seed: int) -> None:
    """Send chats at random moments until cancelled; those on their way end with it."""
    rng = random.Random(seed)
    async with asyncio.TaskGroup() as chats:
        while True:
            await asyncio.sleep(rng.expovariate(CHATS_PER_SECOND))
            chats.create_task(_chat(server, inputs.words(rng, LIVE_WORDS), live))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _phase(
    server: OpenEngine, name: str, engine: RemoteEngine | None, source: Path, seconds: float
) -> Phase:
    with tempfile.TemporaryDirectory() as folder:
        batch = asyncio.create_task(_batch(engine, source, Path(folder)))
        await asyncio.sleep(_WARM_SECONDS)
        assert engine is None or not batch.done(), batch.result()
        live = Live()
        users = asyncio.create_task(_use(server, live, seed=1))
        before = await _generated(server)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        made = await _generated(server) - before - live.tokens
        rate = max(0.0, made) / (time.perf_counter() - began)
        assert engine is None or not batch.done(), "the batch was too small"
        await _ended(users)
        await _ended(batch)
    return Phase(name, 1000 * live.quantile(0.5), 1000 * live.quantile(0.99), rate)


async def _batch(engine: RemoteEngine | None, source: Path, home: Path) -> None:
    if engine is None:
        return
    async with stub_services(home, engine, cache_shared_by="all") as services:
        batch_id = await fetched_batch(services, source)
        await prepare_batch(services, batch_id)
        await run_chunks(services, _MODEL, batch_id=batch_id)


async def measure(seconds: float = 35.0) -> list[Phase]:
    options = ["--max-num-seqs", str(SEATS), "--max-model-len", "2048", "--enforce-eager"]
    server = OpenEngine(
        _MODEL,
        options,
        python=ENGINE_PYTHON,
        weights=SMALL,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with tempfile.TemporaryDirectory() as folder:
        source = inputs.short_requests(
            Path(folder) / "in.jsonl",
            count=BATCH_REQUESTS,
            model=_MODEL,
            seed=1,
            max_tokens=BATCH_TOKENS,
            words_each=BATCH_WORDS,
        )
        await server.start()
        try:
            filling = RemoteEngine(server.url, _MODEL, exclusive=True)
            sharing = RemoteEngine(server.url, _MODEL, max_num_seqs=SEATS)
            promising = RemoteEngine(
                server.url, _MODEL, max_num_seqs=SEATS, objective=Objective(FIRST_TOKEN_SECONDS)
            )
            return [
                await _phase(server, "nothing", None, source, seconds),
                await _phase(server, "a batch that fills it", filling, source, seconds),
                await _phase(server, "a batch that shares it", sharing, source, seconds),
                await _phase(server, "one with an objective", promising, source, seconds),
            ]
        finally:
            await server.stop()


def table(phases: list[Phase]) -> str:
    alone, filling, *_ = phases
    rows = []
    for phase in phases:
        p50 = f"{phase.first_p50:,.0f} ({phase.first_p50 / alone.first_p50:.1f}×)"
        p99 = f"{phase.first_p99:,.0f} (**{phase.first_p99 / alone.first_p99:.1f}×**)"
        share = f"{phase.batch_rate:.0f} (**{phase.batch_rate / filling.batch_rate:.0%}**)"
        rows.append(f"| {phase.name} | {p50} | {p99} | {'–' if phase is alone else share} |")
    head = "| beside them | first token p50, ms | first token p99, ms | the batch, tokens/s |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(asyncio.run(measure()))


if __name__ == "__main__":
    print(section())
