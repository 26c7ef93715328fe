"""How often vLLM throws requests out of a small KV cache, with and without the bound in tokens.

One engine answers two files, one after the other, whose requests say nothing of their lengths but
a limit that is far above most. Each answer ends by itself at a length that only its request body
has: its model is allowed two tokens, of which one ends the answer and is not allowed before that.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.vllm import VllmEngine
from batchyard.engine.warm import WarmEngine
from batchyard.runner.run import Runner
from benchmarks import inputs
from benchmarks.stub_services import fetched_batch, stub_services
from benchmarks.timed import ENGINE_PYTHON, TINY
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.engine.base import CacheState

SEATS = 32
BLOCK_TOKENS = 32
BLOCKS = 160
MEDIAN, MOST = 64, 512
_PROMPT_WORDS = 24
_WRITES, _ENDS = 300, 301
"""Two token ids."""


@dataclass(frozen=True)
class Cost:
    """One file on the engine."""

    name: str
    requests: int
    preemptions: float
    seconds: float
    output_tokens: int

    @property
    def preempted(self) -> float:
        """Preemptions, per request."""
        return self.preemptions / self.requests

    @property
    def token_rate(self) -> float:
        return self.output_tokens / self.seconds


class SwitchedEngine(VllmEngine):
    """vLLM that tells of its cache, or does not: then a runner has the plain window."""

    tells = True

    async def cache_state(self) -> CacheState | None:
        return await super().cache_state() if self.tells else None


def requests_of_unknown_length(path: Path, *, count: int, seed: int) -> Path:
    chance = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            tokens = max(1, min(MOST - 1, round(chance.lognormvariate(0.0, 1.0) * MEDIAN)))
            body = {
                "model": TINY,
                "messages": [{"role": "user", "content": inputs.words(chance, _PROMPT_WORDS)}],
                "max_tokens": MOST,
                "min_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "allowed_token_ids": [_WRITES, _ENDS],
                "logit_bias": {str(_ENDS): 100},
                "stop_token_ids": [_ENDS],
            }
            line = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
    return path


async def measure(count: int = 500, rounds: int = 2) -> list[Cost]:
    """The plain window first, then the bound, in turns, with nothing known of any file."""
    options = (
        *("--max-model-len", "1024", "--max-num-seqs", str(SEATS)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    )
    engine = SwitchedEngine(
        TINY,
        options,
        python=ENGINE_PYTHON,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    kept = WarmEngine(engine)
    try:
        await kept.start()
        found: dict[str, list[Cost]] = {}
        for seed in range(rounds):
            source = partial(requests_of_unknown_length, count=count, seed=seed)
            for name, tells in (("plain window", False), ("bound in expected tokens", True)):
                cost = await _cost(kept, engine, name, source, tells=tells)
                found.setdefault(name, []).append(cost)
        return [_sum(costs) for costs in found.values()]
    finally:
        await kept.close()


async def _cost(
    kept: WarmEngine,
    engine: SwitchedEngine,
    name: str,
    make: Callable[[Path], Path],
    *,
    tells: bool,
) -> Cost:
    engine.tells = tells
    with tempfile.TemporaryDirectory() as folder:
        source = make(Path(folder) / "in.jsonl")
        async with stub_services(Path(folder) / "home", kept) as services:
            batch_id = await fetched_batch(services, source)
            await prepare_batch(services, batch_id)
            before = await VllmEngine.cache_state(engine)
            began = time.perf_counter()
            async with Runner(services, TINY, batch_id=batch_id) as runner:
                await runner.serve()
            seconds = time.perf_counter() - began
            after = await VllmEngine.cache_state(engine)
            chunks = await services.store.chunks.summary(batch_id)
    assert before is not None
    assert after is not None
    assert not chunks.failed, chunks
    preemptions = after.preemptions - before.preemptions
    return Cost(name, chunks.completed, preemptions, seconds, chunks.usage.output_tokens)


def _sum(costs: list[Cost]) -> Cost:
    return Cost(
        costs[0].name,
        sum(each.requests for each in costs),
        sum(each.preemptions for each in costs),
        sum(each.seconds for each in costs),
        sum(each.output_tokens for each in costs),
    )


def table(costs: list[Cost]) -> str:
    lines = [
        "| small KV cache, real vLLM | preemptions per request | output tokens/s, relative |",
        "|---|---|---|",
    ]
    first = costs[0].token_rate
    lines += [
        f"| {each.name} | **{100 * each.preempted:.1f} %** | {each.token_rate / first:.2f}× |"
        for each in costs
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    found = asyncio.run(measure())
    print(found)
    print(table(found))
