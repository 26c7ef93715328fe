"""What it costs that tenants have their own prefix caches: two of them ask about the same texts.

Both ask the same number of questions about the same documents, on one vLLM, one after the other:
once with a salt for each, once without. What differs is that the second tenant's documents must be
read again, and have to fit beside the first one's.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.base import BatchTraits, EngineRequest
from benchmarks import inputs
from benchmarks.comparators import URL
from benchmarks.open_engine import OpenEngine
from benchmarks.timed import ENGINE_PYTHON, SMALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_MODEL = "small-chat"
_WORDS_EACH = 300
_SHAPES = {"one system prompt": (1, 128), "16 documents": (16, 8), "128 documents": (128, 1)}
"""How many texts, and how many questions of each tenant about each."""


@dataclass(frozen=True)
class Cost:
    """Seconds for both tenants, and which part of their prompts came from the cache."""

    shape: str
    shared_seconds: float
    own_seconds: float
    shared_cached: float
    own_cached: float


async def measure(rounds: int = 2) -> list[Cost]:
    options = ["--max-num-seqs", "16", "--max-model-len", "2048", "--enforce-eager"]
    engine = OpenEngine(
        _MODEL,
        options,
        python=ENGINE_PYTHON,
        weights=SMALL,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )
    await engine.start()
    try:
        await _run(engine, [(None, body) for body in _bodies(1, 16, seed=0)])
        return [
            await _compare(engine, shape, *size, rounds=rounds) for shape, size in _SHAPES.items()
        ]
    finally:
        await engine.stop()


async def _compare(
    engine: OpenEngine, shape: str, documents: int, questions: int, *, rounds: int
) -> Cost:
    bodies = _bodies(documents, questions, seed=1)
    own = [("alice", body) for body in bodies] + [("bob", body) for body in bodies]
    shared = [(None, body) for _, body in own]
    seconds: dict[str, list[float]] = {"own": [], "shared": []}
    cached: dict[str, float] = {}
    for _ in range(rounds):
        for name, requests in (("own", own), ("shared", shared)):
            await engine.empty_cache()
            took, cached[name] = await _run(engine, requests)
            seconds[name].append(took)
    return Cost(shape, min(seconds["shared"]), min(seconds["own"]), cached["shared"], cached["own"])


def _bodies(documents: int, questions: int, *, seed: int) -> list[bytes]:
    """In the order in which Batchyard sends them: what begins alike, together."""
    with tempfile.TemporaryDirectory() as folder:
        file = inputs.document_questions(
            Path(folder) / "in.jsonl",
            documents=documents,
            questions=questions,
            words_each=_WORDS_EACH,
            model=_MODEL,
            seed=seed,
        )
        lines = map(json.loads, file.read_text().splitlines())
        return sorted(json.dumps(line["body"]).encode() for line in lines)


async def _run(engine: OpenEngine, requests: list[tuple[str | None, bytes]]) -> tuple[float, float]:
    """Seconds, and the part of all prompt tokens that was cached; one tenant after the other."""

    async def stream(tenant: str | None) -> AsyncIterator[EngineRequest]:
        for number, (salt, body) in enumerate(requests):
            if salt == tenant:
                yield EngineRequest(
                    number, URL, body, f"{tenant}-{number}", of_batch=BatchTraits(cache_salt=salt)
                )

    prompt = cached = 0
    began = time.perf_counter()
    for tenant in dict.fromkeys(salt for salt, _ in requests):
        async for answer in engine.stream(stream(tenant), timeout_seconds=600):
            assert answer.status == 200, answer.body
            usage = json.loads(answer.body)["usage"]
            prompt += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return time.perf_counter() - began, cached / prompt


def table(costs: list[Cost]) -> str:
    return "\n".join(
        [
            "| two tenants, 128 questions each | one cache: hits | own caches: hits | time |",
            "|---|---|---|---|",
            *(
                f"| about the same {cost.shape} | {cost.shared_cached:.0%} | {cost.own_cached:.0%} "
                f"| **{cost.own_seconds / cost.shared_seconds:.2f}×** |"
                for cost in costs
            ),
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(asyncio.run(measure()))


if __name__ == "__main__":
    print(section())
