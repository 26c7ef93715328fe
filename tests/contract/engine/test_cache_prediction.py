"""What we predict of the engine's prefix cache, against what it says itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import EngineRequest
from batchyard.lines.framing import parse_envelope
from batchyard.lines.lines import Validator
from batchyard.lines.rules import Rules
from batchyard.locations.local_file import LocalFile
from batchyard.plan.cache import CacheShape
from batchyard.plan.planner import Planner
from batchyard.plan.records import BYTES_PER_TOKEN, read_records
from batchyard.settings import read_settings
from batchyard.steps.estimate import Assumptions, estimate_file
from benchmarks.inputs import document_questions
from tests.contract.engine.conftest import MODEL, require_vllm, vllm_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.vllm.vllm import VllmEngine

SHAPE = CacheShape(blocks=160, block_tokens=32, sequences=8, step_tokens=2048)
OPTIONS = (
    *("--max-model-len", "2048", "--block-size", str(SHAPE.block_tokens)),
    *("--num-gpu-blocks-override", str(SHAPE.blocks), "--max-num-seqs", str(SHAPE.sequences)),
    *("--max-num-batched-tokens", str(SHAPE.step_tokens)),
)
POINTS = 0.04


def plan_of(path: Path) -> Any:
    """The records of a file of requests, in the order of execution."""
    planner = Planner(order="prefix", spool=path.parent, chunk_requests=10_000)
    with path.open("rb") as file:
        for line in Validator(Rules(endpoint=None)).lines(file):
            planner.add(line)
    with (path.parent / "plan").open("wb") as plan:
        planner.write(plan)
    return read_records((path.parent / "plan").read_bytes())


async def cache_counters(engine: VllmEngine) -> tuple[float, float]:
    """Prompt tokens that were looked up, and that were found."""
    totals = dict.fromkeys(("queries", "hits"), 0.0)
    for line in (await engine.metrics()).splitlines():
        for name in totals:
            if line.startswith(f"vllm:prefix_cache_{name}_total{{"):
                totals[name] += float(line.split()[-1])
    return totals["queries"], totals["hits"]


async def hit_rate(engine: VllmEngine, lines: list[bytes]) -> tuple[float, float]:
    """Run the requests in this order; the engine's own hit rate, and its prompt tokens."""
    queries, hits = await cache_counters(engine)

    async def requests() -> AsyncIterator[EngineRequest]:
        for number, line in enumerate(lines):
            envelope = parse_envelope(line)
            yield EngineRequest(number, envelope.url, bytes(envelope.body), f"request-{number}")

    statuses = [one.status async for one in engine.stream(requests(), timeout_seconds=60)]
    assert statuses == [200] * len(lines)
    queries_after, hits_after = await cache_counters(engine)
    queries, hits = queries_after - queries, hits_after - hits
    return hits / queries, queries


@pytest.mark.vllm
async def test_the_hit_rate_of_either_order_is_predicted_within_four_points(
    tmp_path: Path,
) -> None:
    """Each order on a file of its own: what is left of the first is only what goes first."""
    require_vllm()
    files = [
        document_questions(
            tmp_path / f"{seed}.jsonl",
            documents=30,
            questions=8,
            words_each=75,
            model=MODEL,
            seed=seed,
        )
        for seed in (1, 2)
    ]
    engine = vllm_engine(tmp_path, *OPTIONS)
    await engine.start()
    try:
        sorted_file = files[0].read_bytes()
        plan = plan_of(files[0])
        in_our_order = [sorted_file[r["offset"] :][: r["length"]] for r in plan]
        ours, prompt_tokens = await hit_rate(engine, in_our_order)
        as_written, _ = await hit_rate(engine, files[1].read_bytes().splitlines())
    finally:
        await engine.stop()
    bytes_per_token = BYTES_PER_TOKEN * int(plan["prompt_tokens"].sum()) / prompt_tokens
    assumptions = Assumptions(bytes_per_token=bytes_per_token, shape=SHAPE)
    predicted = [
        (await estimate_file(read_settings(), LocalFile(path), assumptions)).order for path in files
    ]
    assert predicted[0] is not None
    assert predicted[1] is not None
    assert abs(predicted[0].ours.hit_rate - ours) < POINTS
    assert abs(predicted[1].as_written.hit_rate - as_written) < POINTS
    # Or there was nothing to predict.
    assert ours > as_written + 0.2
