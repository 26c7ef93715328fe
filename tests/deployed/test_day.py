"""A day in the life, in minutes: two models on two real engines, thirty batches, four accidents.

Shows what it did with ``-s``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from tests.deployed.conftest import deployed_in, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.store import BatchRecord
    from tests.deployed.conftest import Deployment
    from tests.services.prefect import PrefectServer

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.vllm,
]

MODELS = ("day-a", "day-b")
SIZES = (3, 10, 40, 120, 400)
WINDOWS = (30 * 60, 3600, 6 * 3600, 24 * 3600)
LONG = 2500
"""Requests of those batches that something happens to."""
PAUSED_SECONDS = 8.0
TO_THE_END_SECONDS = 900.0


@pytest.fixture(scope="module", name="server")
def server_with_two_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    folder = tmp_path_factory.mktemp("day")
    with deployed_in(folder, BATCHYARD_ENGINE_SLOTS='["0", "1"]') as running:
        yield running


@dataclass
class Asked:
    what: str
    model: str
    source: Path
    window_seconds: int
    id: str = ""


async def test_a_day_with_two_models_and_thirty_batches(deployment: Deployment) -> None:
    """One runner killed, one batch cancelled, one expired, one paused and resumed."""
    await deployment.limit_pool(len(MODELS))
    for model in MODELS:
        await deployment.serve_vllm(model)
    asked = _asked(deployment)
    for each in asked:
        each.id = await deployment.create(each.source, window_seconds=each.window_seconds)
    by_what = {each.what: each for each in asked}

    killed, stood_at, _ = await asyncio.gather(
        _kill_a_runner(deployment, by_what["killed"]),
        _pause_for_a_while(deployment, by_what["paused"].id),
        _cancel(deployment, by_what["cancelled"].id),
    )

    ended = {each.what: await deployment.ended_batch(each.id, TO_THE_END_SECONDS) for each in asked}
    for each in asked:
        await deployment.checked(each.id, each.source)
    print(f"\n{_table(asked, ended)}; {killed} killed; paused at {stood_at}")  # noqa: T201
    assert ended.pop("cancelled").status is BatchStatus.CANCELLED
    assert ended.pop("expired").status is BatchStatus.EXPIRED
    assert {batch.status for batch in ended.values()} == {BatchStatus.COMPLETED}
    assert all(batch.counts.failed == 0 for batch in ended.values())


def _asked(deployment: Deployment) -> list[Asked]:
    """Four long ones for the accidents among 26 of mixed size and window."""
    dice = random.Random(20)
    asked = []
    for number in range(26):
        model = MODELS[number % len(MODELS)]
        what = f"{number:02d}"
        source, _ = deployment.input(model, dice.choice(SIZES), what)
        asked.append(Asked(what, model, source, dice.choice(WINDOWS)))
    for number, what in enumerate(("killed", "cancelled", "expired", "paused")):
        model = MODELS[number % len(MODELS)]
        # Four times as much as two engines were seen to do in that time, loading left out.
        count, window_seconds = (4 * LONG, 75) if what == "expired" else (LONG, 3600)
        source, _ = deployment.input(model, count, what, max_tokens=128)
        asked.append(Asked(what, model, source, window_seconds))
    dice.shuffle(asked)
    return asked


async def _kill_a_runner(deployment: Deployment, batch: Asked) -> str:
    """SIGKILL to the flow run's process that serves the batch's model, in the middle of it."""
    await deployment.answered(batch.id, 20, TO_THE_END_SECONDS)
    run = next(
        run for run in await deployment.runners(batch.model) if run["state"]["type"] == "RUNNING"
    )
    os.kill(int(run["infrastructure_pid"]), signal.SIGKILL)
    return str(run["name"])


async def _cancel(deployment: Deployment, batch_id: str) -> None:
    await deployment.answered(batch_id, 20, TO_THE_END_SECONDS)
    assert (await deployment.run("batchyard", "cancel", batch_id)).strip() == "cancelling"


async def _pause_for_a_while(deployment: Deployment, batch_id: str) -> int:
    """Pause, see that it stands still, resume; how many requests were answered then."""
    await deployment.answered(batch_id, 20, TO_THE_END_SECONDS)
    await deployment.run("batchyard", "pause", batch_id)

    chunks = deployment.services.store.chunks

    async def stands_still() -> bool:
        # What is in the engine is finished first: requests of one length, which end together.
        return not (await chunks.summary(batch_id)).leased

    await until(stands_still)
    stood_at = (await chunks.summary(batch_id)).completed
    await asyncio.sleep(PAUSED_SECONDS)
    assert (await chunks.summary(batch_id)).completed == stood_at < LONG
    await deployment.run("batchyard", "unpause", batch_id)
    return stood_at


def _table(asked: list[Asked], ended: dict[str, BatchRecord]) -> str:
    lines = ["  batch      model  window   status     completed  failed   total"]
    for each in asked:
        batch = ended[each.what]
        counts = batch.counts
        lines.append(
            f"  {each.what:10} {each.model:6} {each.window_seconds:5} s  {batch.status:10} "
            f"{counts.completed:9} {counts.failed:7} {counts.total:7}"
        )
    statuses = Counter(str(batch.status) for batch in ended.values())
    requests = sum(batch.counts.completed for batch in ended.values())
    return "\n".join([*lines, f"  {dict(statuses)}, {requests:,} requests answered"])
