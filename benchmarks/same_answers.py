"""B11: whether a request has the same answer in any order and any window, and what that costs.

The same requests with ``temperature`` 0 run in three orders, each in three windows, on one real
vLLM after the other: as Batchyard starts it, and with ``VLLM_BATCH_INVARIANT``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import inputs
from benchmarks.comparators import exchange, one_window
from benchmarks.open_engine import OpenEngine
from benchmarks.timed import ENGINE_PYTHON, TINY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchyard.engine.base import Engine

_MODEL = "tiny-chat"
_OPTIONS = ("--max-model-len", "2048")
WINDOWS = (4, 32, 128)


@dataclass(frozen=True)
class Answers:
    """``texts``: requests that had more than one text, of the nine; ``logprobs``: more than one
    text or probability of a token. ``seconds``: of each whole run."""

    requests: int
    texts: int
    logprobs: int
    seconds: tuple[float, ...]


def measure(requests: int = 200, options: Sequence[str] = ()) -> dict[bool, Answers]:
    """Without and with ``VLLM_BATCH_INVARIANT``."""
    return {
        is_invariant: asyncio.run(_of_engine(requests, options, is_invariant=is_invariant))
        for is_invariant in (False, True)
    }


async def _of_engine(requests: int, options: Sequence[str], *, is_invariant: bool) -> Answers:
    engine = OpenEngine(
        _MODEL,
        [*_OPTIONS, *options],
        python=ENGINE_PYTHON,
        weights=TINY,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_BATCH_INVARIANT": str(int(is_invariant)),
        },
    )
    await engine.start()
    try:
        return await answers_of(engine, bodies(requests))
    finally:
        await engine.stop()


async def answers_of(engine: Engine, asked: Sequence[bytes]) -> Answers:
    """Run all of them in each order and each window."""
    texts: list[set[str]] = [set() for _ in asked]
    logprobs: list[set[str]] = [set() for _ in asked]
    seconds = []
    async with exchange(engine) as send:
        await one_window(send, asked[:8], 8)
        for order in _orders(len(asked)):
            for window in WINDOWS:
                began = time.perf_counter()
                answers = await one_window(send, [asked[index] for index in order], window)
                seconds.append(time.perf_counter() - began)
                for index, answer in zip(order, answers, strict=True):
                    (choice,) = json.loads(answer)["choices"]
                    texts[index].add(choice["message"]["content"])
                    logprobs[index].add(json.dumps(choice["logprobs"]))
    several = (sum(len(each) > 1 for each in of_each) for of_each in (texts, logprobs))
    return Answers(len(asked), *several, tuple(seconds))


def bodies(count: int, *, model: str = _MODEL, max_tokens: int = 16) -> list[bytes]:
    """Chat requests of which groups begin alike, as those of batches do."""
    with tempfile.TemporaryDirectory() as folder:
        file = inputs.document_questions(
            Path(folder) / "in.jsonl",
            documents=max(1, count // 8),
            questions=8,
            words_each=60,
            model=model,
            seed=1,
        )
        lines = [json.loads(line)["body"] for line in file.read_text().splitlines()[:count]]
    more = {"max_tokens": max_tokens, "temperature": 0, "logprobs": True}
    return [json.dumps({**body, **more}).encode() for body in lines]


def _orders(count: int) -> Iterator[list[int]]:
    """As they are, backwards, and mixed."""
    order = list(range(count))
    yield order
    yield order[::-1]
    yield random.Random(1).sample(order, count)


def table(found: dict[bool, Answers]) -> str:
    before = statistics.median(found[False].seconds)
    names = {False: "as Batchyard starts it", True: "`VLLM_BATCH_INVARIANT=1`"}
    runs = f"{found[False].requests} requests, 3 orders, 3 windows"
    lines = [
        f"| {runs} | several texts | several probabilities of a token | time |",
        "|---|---|---|---|",
    ]
    for is_invariant, each in found.items():
        took = statistics.median(each.seconds) / before
        shares = (f"{some / each.requests:.1%}" for some in (each.texts, each.logprobs))
        lines.append(f"| {names[is_invariant]} | {' | '.join(shares)} | {took:.2f}× |")
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    print(section())
