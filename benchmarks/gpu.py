"""`make bench-gpu MODEL=path`: B1 to B3 on a GPU, with any options of vLLM.

Into docs/benchmarks-gpu.md, table after table, each when it is measured.

The same files and comparisons as on the CPU (:mod:`benchmarks.plan_gain`, ``no_barrier`` and
``overhead``), with engines of the model that is given. The cache of B1 is cut to a third of what
the prompts share, counted by the model's own tokenizer.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import inputs, no_barrier, overhead, page, plan_gain, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SAMPLE_REQUESTS = 20
_LEAST_BLOCKS = plan_gain.MODEL_TOKENS // plan_gain.BLOCK_SIZE + 4
"""An engine refuses a cache that has no room for one request of the longest kind."""


NOT_MEASURED = "Not measured:"


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


WHOLE = Size(
    plan_gain.Size(unshared=500),
    overhead.Size(),
    sequences=64,
    tail=6_000,
    part=640,
)
SHORT = Size(
    plan_gain.Size(unshared=150),
    overhead.Size(requests=3_000, barrier_requests=100),
    sequences=64,
    tail=2_000,
    part=192,
)
"""For a GPU that one has for half an hour; most of that is starts of engines."""


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


def measure(
    model: str, *, on_cpu: bool = False, size: Size = WHOLE, options: Sequence[str] = ()
) -> Iterator[str]:
    """What the page is to say, part after part: what it is about, then a part for each table.

    ``options``: further ones of every engine, which override those of the benchmarks. A table that
    could not be measured is a part that says why; the others are measured anyway.
    Raises :class:`Refused`, before the first part; without a GPU unless ``on_cpu``.
    """
    check(model)
    facts = _facts(model, size)
    if facts["device"] is None and not on_cpu:
        raise Refused(
            "PyTorch of the engine environment sees no GPU: run `make setup DEVICE=cuda` on a "
            "machine that has one."
        )
    device = facts["device"] or "the CPU, and no GPU"
    name, cores = page.processor()
    given = f" Every engine has `{shlex.join(options)}`." if options else ""
    yield (
        f"{Path(model).name} with vLLM {facts['vllm']} and PyTorch {facts['torch']} on {device}; "
        f"{cores} cores of {name}.{given}"
    )
    yield _part(
        "B1: the order of requests",
        lambda: plan_gain.table(
            plan_gain.measure(
                size.plan_gain, model=model, blocks=_blocks(facts, size), options=options
            )
        ),
    )
    yield _part(
        "B3: overhead around the engine",
        lambda: overhead.table(overhead.measure(size.overhead, model=model, options=options)),
    )
    yield _part(
        "B2: no barrier between chunks",
        lambda: no_barrier.table(
            [
                no_barrier.on_vllm(
                    size.tail,
                    size.part,
                    model=model,
                    sequences=size.sequences,
                    options=options,
                )
            ]
        ),
    )


def _part(title: str, table: Callable[[], str]) -> str:
    try:
        text = table()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is that table's
        # An engine that did not start for one table may start for the next one.
        text = f"{NOT_MEASURED} {error}"
    return f"## {title}\n\n{text}"


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
    parser.add_argument("--short", action="store_true", help="smaller files, so less certain")
    parser.add_argument(
        "--engine-options", type=shlex.split, default=[], help="of vLLM, as in a shell"
    )
    given = parser.parse_args(words)
    size = SHORT if given.short else WHOLE
    parts: list[str] = []
    try:
        for part in measure(given.model, size=size, options=given.engine_options):
            parts.append(part)
            page.write("gpu", "\n\n".join(parts), given.page)
            print(f"{part}\n", flush=True)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(f"written: {given.page}")
    return 1 if any(NOT_MEASURED in part for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
