"""B1: what the order of requests is worth under a small KV cache, and what it costs where nothing.

Three shuffled files whose prompts share beginnings, and one whose prompts do not. Each is answered
by vLLM's own ``run_batch``, by a plain client of ``vllm serve`` and by the whole process-batch
flow, on engines with the same options.
The file that shares nothing is answered by us in its own order too, in pairs, since what is to be
seen there is less than the noise of one run.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import inputs
from benchmarks.plot import Bar, bars, save
from benchmarks.timed import (
    COMMON_OPTIONS,
    HTTP_INSTALLED,
    OURS,
    OURS_INPUT_ORDER,
    RUN_BATCH,
    SMALL,
    Job,
    cache_ceilings,
    median_rate,
    of_way,
    run_jobs,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.timed import Timed

BLOCK_SIZE = 128
BLOCKS = 104
MODEL_TOKENS = 2048
MAX_NUM_SEQS = 32
_WHOLE = (RUN_BATCH, HTTP_INSTALLED, OURS)


@dataclass(frozen=True)
class Size:
    """``groups`` beginnings with ``each`` requests; ``pairs`` files that share nothing."""

    groups: int = 32
    each: int = 16
    unshared: int = 100
    pairs: int = 3


@dataclass(frozen=True)
class Gain:
    """Requests per second, medians over the files; hit rates as shares of the prompt tokens."""

    name: str
    run_batch: float
    naive: float
    """Of the plain client of ``vllm serve`` as it is installed."""
    ours: float
    input_order: float | None
    """Ours, without the reordering; None where it was not measured."""
    loss: float | None
    """Of our order against the input's: the median over the pairs."""
    run_batch_cached: float
    naive_cached: float
    cached: float
    ceiling: float
    spread: float | None
    """None: there was one file."""

    @property
    def share_of_ceiling(self) -> float:
        return self.cached / self.ceiling if self.ceiling else 1.0


def kinds(size: Size, model: str = SMALL) -> dict[str, Callable[[Path, int], Path]]:
    """How each of the three files that share is written, from a path and a seed."""
    return {
        "few-shot templates": lambda path, seed: inputs.few_shot_templates(
            path, templates=size.groups, inputs=size.each, words_each=280, model=model, seed=seed
        ),
        "questions on documents": lambda path, seed: inputs.document_questions(
            path,
            documents=size.groups,
            questions=size.each,
            words_each=300,
            model=model,
            seed=seed,
        ),
        "four-level tree": lambda path, seed: inputs.four_level_tree(
            path,
            branches=(2, 4, max(1, size.groups // 4), max(1, size.each // 2)),
            words_each=300,
            model=model,
            seed=seed,
        ),
    }


def measure(
    size: Size | None = None,
    *,
    model: str = SMALL,
    blocks: int = BLOCKS,
    options: Sequence[str] = (),
) -> list[Gain]:
    """With a small KV cache of ``blocks`` blocks. ``options``: further ones of the engines."""
    size = size or Size()
    limits = ("--max-model-len", str(MODEL_TOKENS), "--max-num-seqs", str(MAX_NUM_SEQS))
    cache = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(blocks))
    options = ("--model", model, *limits, *cache, *COMMON_OPTIONS, *options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = inputs.long_requests(
            folder / "warm.jsonl", count=32, words_each=300, model=model, seed=99
        )
        files: dict[str, list[str]] = {}
        for kind, (title, make) in enumerate(kinds(size, model).items()):
            files[title] = [str(make(folder / f"{kind}.jsonl", kind))]
        unshared = [
            str(
                inputs.long_requests(
                    folder / f"unshared-{seed}.jsonl",
                    count=size.unshared,
                    words_each=300,
                    model=model,
                    seed=seed,
                )
            )
            for seed in range(size.pairs)
        ]
        jobs = [
            Job(way, file)
            for file in (file for each in files.values() for file in each)
            for way in _WHOLE
        ]
        for number, file in enumerate(unshared):
            # Which of a pair comes first alternates.
            pair = (OURS, OURS_INPUT_ORDER) if number % 2 else (OURS_INPUT_ORDER, OURS)
            jobs += [Job(way, file) for way in (RUN_BATCH, HTTP_INSTALLED, *pair)]
        files["nothing shared"] = unshared
        timed = run_jobs(jobs, options, warm_up=str(warm_up))
        firsts = [each[0] for each in files.values()]
        ceilings = cache_ceilings(firsts, model=model, block_size=BLOCK_SIZE)
        return [
            _gain(title, [one for one in timed if one.job.file in each], ceiling)
            for (title, each), ceiling in zip(files.items(), ceilings, strict=True)
        ]


def _gain(name: str, timed: list[Timed], ceiling: float) -> Gain:
    in_input_order = {one.job.file: one.seconds for one in of_way(timed, OURS_INPUT_ORDER)}
    losses = [
        one.seconds / in_input_order[one.job.file] - 1
        for one in of_way(timed, OURS)
        if one.job.file in in_input_order
    ]
    return Gain(
        name,
        run_batch=median_rate(timed, RUN_BATCH),
        naive=median_rate(timed, HTTP_INSTALLED),
        ours=median_rate(timed, OURS),
        input_order=median_rate(timed, OURS_INPUT_ORDER) if losses else None,
        loss=statistics.median(losses) if losses else None,
        run_batch_cached=_cached(timed, RUN_BATCH),
        naive_cached=_cached(timed, HTTP_INSTALLED),
        cached=_cached(timed, OURS),
        ceiling=ceiling,
        spread=spread(timed) if losses else None,
    )


def _cached(timed: list[Timed], way: str) -> float:
    return statistics.median(one.cached for one in of_way(timed, way))


def table(gains: list[Gain]) -> str:
    client = f"plain aiohttp client, {2 * MAX_NUM_SEQS} in flight"
    heading = (
        f"| shuffled file | `run_batch`, requests/s | {client}, requests/s | Batchyard, requests/s "
        "| of `run_batch` | of the client | hit rates of the three | ceiling "
        "| share of the ceiling | spread |"
    )
    lines = [heading, "|---|---|---|---|---|---|---|---|---|---|"]
    for gain in gains:
        noise = "–" if gain.spread is None else f"{100 * gain.spread:.0f} %"
        share = f"**{100 * gain.share_of_ceiling:.0f} %**" if gain.ceiling else "–"
        hits = (gain.run_batch_cached, gain.naive_cached, gain.cached)
        lines.append(
            f"| {gain.name} | {gain.run_batch:.0f} | {gain.naive:.0f} | {gain.ours:.0f} "
            f"| **{gain.ours / gain.run_batch:.2f}×** | **{gain.ours / gain.naive:.2f}×** "
            f"| {', '.join(f'{100 * each:.0f} %' for each in hits)} "
            f"| {100 * gain.ceiling:.0f} % | {share} | {noise} |"
        )
    for gain in gains:
        if gain.loss is not None and gain.input_order is not None:
            lines.append("")
            lines.append(
                f"With {gain.name}, our order costs **{100 * gain.loss:+.1f} %** of time against "
                f"the file's own ({gain.input_order:.0f} requests/s)."
            )
    return "\n".join(lines)


def section() -> str:
    """Measure, draw, and return what the page is to say."""
    gains = measure()
    rows = [
        bar
        for gain in gains
        for bar in (
            Bar(gain.name, "run_batch", gain.run_batch),
            Bar(gain.name, "plain client", gain.naive),
            Bar(gain.name, "Batchyard", gain.ours, is_ours=True),
        )
    ]
    picture = save("plan_gain", bars("Requests per second, shuffled files", rows))
    return f"{table(gains)}\n\n{picture}"


if __name__ == "__main__":
    print(table(measure()))
