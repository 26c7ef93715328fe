"""`make bench-gpu MODEL=path`: B1 to B3 and a grid of options with a real model on a GPU.

Into docs/benchmarks-gpu.md.

The same files and comparisons as on the CPU (:mod:`benchmarks.plan_gain`, ``no_barrier`` and
``overhead``), with engines of the model that is given. The cache of B1 is cut to a third of what
the prompts share, counted by the model's own tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import inputs, no_barrier, overhead, page, plan_gain, timed, tuning

_SAMPLE_REQUESTS = 20
_LEAST_BLOCKS = plan_gain.MODEL_TOKENS // plan_gain.BLOCK_SIZE + 4
"""An engine refuses a cache that has no room for one request of the longest kind."""


class Refused(Exception):
    """Nothing can be measured here; the message says what to do."""


@dataclass(frozen=True)
class Size:
    """``sequences``: of the engine in B2. ``tail``, ``part``: requests of B2, and of its loops."""

    plan_gain: plan_gain.Size
    overhead: overhead.Size
    sequences: int
    tail: int
    part: int
    grid: tuning.GridSize


WHOLE = Size(
    plan_gain.Size(unshared=500),
    overhead.Size(),
    sequences=64,
    tail=6_000,
    part=640,
    grid=tuning.GridSize(requests=6_000, tuned=12_000, words=400, output=256, seats=256),
)


def check(model: str) -> None:
    """Raise :class:`Refused` where there is no such model, or nothing to run it with."""
    if not model:
        raise Refused("Which model? make bench-gpu MODEL=/path/to/model")
    if not (Path(model) / "config.json").is_file():
        raise Refused(
            f"No model at {model}: MODEL is a folder with config.json, weights and tokenizer. "
            "Nothing is downloaded here."
        )
    if not timed.ENGINE_PYTHON.is_file():
        raise Refused(
            f"No engine environment at {timed.ENGINE_PYTHON}: run `make setup DEVICE=cuda`."
        )


def measure(model: str, *, on_cpu: bool = False, size: Size = WHOLE) -> str:
    """What the page is to say. Raises :class:`Refused`; without a GPU unless ``on_cpu``."""
    check(model)
    facts = _facts(model, size)
    if facts["device"] is None and not on_cpu:
        raise Refused(
            "PyTorch of the engine environment sees no GPU: run `make setup DEVICE=cuda` on a "
            "machine that has one."
        )
    device = facts["device"] or "the CPU, and no GPU"
    name, cores = page.processor()
    gains = plan_gain.measure(size.plan_gain, model=model, blocks=_blocks(facts, size))
    shares = no_barrier.on_vllm(size.tail, size.part, model=model, sequences=size.sequences)
    rates = overhead.measure(size.overhead, model=model)
    grid = asyncio.run(tuning.measure_grid(size.grid, model=model))
    return "\n\n".join(
        (
            f"{Path(model).name} with vLLM {facts['vllm']} on {device}; {cores} cores of {name}.",
            f"## B1: the order of requests\n\n{plan_gain.table(gains)}",
            f"## B2: no barrier between chunks\n\n{no_barrier.table([shares])}",
            f"## B3: overhead around the engine\n\n{overhead.table(rates)}",
            f"## Engines that tune themselves\n\n{tuning.grid_table(grid)}",
        )
    )


def _facts(model: str, size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sample = inputs.document_questions(
            Path(folder) / "sample.jsonl",
            documents=_SAMPLE_REQUESTS,
            questions=1,
            words_each=300,
            model=model,
            seed=size.plan_gain.groups,
        )
        return timed.facts_of(model, str(sample))


def _blocks(facts: dict[str, Any], size: Size) -> int:
    """Of the cache: for a third of the beginnings that the requests share."""
    shared = facts["tokens"] * size.plan_gain.groups
    return max(_LEAST_BLOCKS, round(shared / 3 / plan_gain.BLOCK_SIZE))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("model", nargs="?", default="", help="the folder of the model")
    parser.add_argument("--page", type=Path, default=page.GPU_PAGE, help="where its table goes")
    options = parser.parse_args(words)
    try:
        text = measure(options.model)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    page.write("gpu", text, options.page)
    print(f"written: {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
