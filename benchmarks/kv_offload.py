"""What the preset ``kv_offload`` is worth: main memory for what the KV cache has no room for.

Questions on documents, a third of which fit into the cache, in the file's own shuffled order and in
ours, on an engine with the preset and on one without it. vLLM does this on GPUs only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.presets import with_presets
from benchmarks.plan_gain import engine_options, kinds, warm_up_file
from benchmarks.timed import OURS, OURS_INPUT_ORDER, Job, run_jobs

if TYPE_CHECKING:
    from benchmarks.plan_gain import Size
    from benchmarks.timed import Timed

GIB = 8.0
"""Of main memory: enough for all documents with models of up to some ten billion weights."""
_NAMES = {OURS_INPUT_ORDER: "the file's own order", OURS: "our order"}


def measure(size: Size, *, model: str, blocks: int) -> list[tuple[str, Timed]]:
    """What came of each order, without and with the preset; ``blocks``: those of the GPU's cache.

    Each order has a file of its own, as what is in main memory outlasts a job.
    """
    write = kinds(size, model)["questions on documents"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up = warm_up_file(folder, model)
        jobs = [
            Job(way, str(write(folder / f"{seed}.jsonl", seed)))
            for seed, way in enumerate(_NAMES, start=1)
        ]
        found: list[tuple[str, Timed]] = []
        for title, gib in (("without", 0.0), ("with", GIB)):
            words = with_presets(engine_options(model, blocks), kv_offload=gib)
            timed = run_jobs(jobs, words, warm_up=str(warm_up))
            found += [(title, one) for one in timed]
    return found


def table(found: list[tuple[str, Timed]]) -> str:
    """What the page is to say."""
    before = {one.job.way: one.rate for title, one in found if title == "without"}
    return "\n".join(
        [
            f"| questions on documents | `kv_offload={GIB:g}` | requests/s | ratio | hit rate |",
            "|---|---|---|---|---|",
            *(
                f"| {_NAMES[one.job.way]} | {title} | {one.rate:.0f} "
                f"| {one.rate / before[one.job.way]:.2f}× | {one.cached:.0%} |"
                for title, one in found
            ),
        ]
    )
