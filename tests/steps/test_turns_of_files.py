"""Lines that name files have their turns in the window as all others do."""

from __future__ import annotations

import asyncio
import base64

from batchyard.engine.stub.stub import StubEngine
from tests.steps.conftest import Yard, until
from tests.steps.test_turns import LARGE, SOON_SECONDS, ended, large_batch, serving


def audio_lines(name: str, count: int) -> list[dict[str, object]]:
    """Each with a sound of its own and ``name`` as its prompt."""

    def body(number: int) -> dict[str, str]:
        sound = base64.b64encode(b"sound %d" % number).decode()
        url = f"data:audio/wav;base64,{sound}"
        return {"model": "stub-model", "file_url": url, "prompt": name}

    url = "/v1/audio/transcriptions"
    return [
        {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body(number)}
        for number in range(count)
    ]


async def test_lines_with_files_are_not_all_ahead_of_the_lines_of_another_tenant(
    yard: Yard,
) -> None:
    """They are the larger requests, so they are fewer than half of what runs."""
    both = await first_to_run(yard, audio_lines("first", LARGE), large_batch("second"))
    assert 0.5 < both.count("second") / len(both) < 1.0


async def test_lines_with_files_of_two_tenants_run_side_by_side(yard: Yard) -> None:
    both = await first_to_run(yard, audio_lines("first", LARGE), audio_lines("second", LARGE))
    assert 0.35 < both.count("second") / len(both) < 0.65


async def first_to_run(
    yard: Yard, first: list[dict[str, object]], second: list[dict[str, object]]
) -> list[str]:
    """Whose lines run as long as both tenants have some, each in a single chunk."""
    yard.set(chunk_requests=LARGE)
    await yard.prepared(first, tenant="first")
    await yard.prepared(second, tenant="second")
    engine = StubEngine(max_num_seqs=8, latency=0.01)
    async with serving(yard, engine):
        await until(lambda: asyncio.sleep(0, engine.executed >= LARGE), seconds=SOON_SECONDS)
    ran = ["second" if b"second" in request.body else "first" for request in engine.log]
    both = ran[ran.index("second") : 3 * LARGE // 4]
    assert len(both) > LARGE // 4
    return both


async def test_an_urgent_batch_goes_before_the_lines_with_files_of_a_background_batch(
    yard: Yard,
) -> None:
    """Though all of these are a single chunk, which was claimed first."""
    yard.set(chunk_requests=LARGE)

    def latency(_: bytes) -> float:
        # However long a busy machine takes to plan the urgent one, the other still runs.
        return 0.02 if engine.executed < LARGE / 4 else 0.5

    engine = StubEngine(max_num_seqs=8, latency=latency)
    background = await yard.prepared(
        audio_lines("background", LARGE), tenant="first", completion_window="background"
    )
    async with serving(yard, engine):
        await until(lambda: asyncio.sleep(0, engine.executed), seconds=SOON_SECONDS)
        urgent = await yard.create(
            audio_lines("urgent", 10), tenant="second", completion_window="1h"
        )
        await until(lambda: ended(yard, [urgent]), seconds=SOON_SECONDS)
        assert not await ended(yard, [background])
        assert engine.executed < LARGE / 2
