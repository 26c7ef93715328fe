"""The inputs of batches as local files of a runner: for how long it keeps them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.runner.chunk.batch_traits import TraitsOfBatches
from batchyard.runner.claims import inputs as module
from batchyard.runner.claims.inputs import KEPT_SECONDS, Inputs
from batchyard.services.keys import file_key
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.storage.memory import MemoryStorage
from tests.lifecycle import run_chunks
from tests.steps.conftest import Yard, chat_line, until

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def far(yard: Yard) -> Yard:
    """With a storage that has no local files."""
    yard.services = replace(yard.services, storage=MemoryStorage())
    return yard


async def prepared(yard: Yard, name: str) -> str:
    return await yard.prepared([chat_line(f"{name}-{n}", f"question {n}") for n in range(5)])


async def copy_of(yard: Yard, batch_id: str) -> Path:
    batch = await yard.services.store.batches.get(batch_id)
    return yard.services.spool / file_key(batch.input_file_id)


def copies(yard: Yard) -> list[str]:
    return [path.name for path in (yard.services.spool / "files").glob("*")]


async def test_a_copy_that_was_not_used_for_a_while_is_removed(far: Yard, clock: Clock) -> None:
    inputs = Inputs(far.services, clock)
    batch_id = await prepared(far, "a")
    path = await inputs.path(batch_id)
    assert path == await copy_of(far, batch_id)
    clock.now = KEPT_SECONDS - 1
    await inputs.remove_unused(())
    assert copies(far) == [path.name]
    clock.now = KEPT_SECONDS
    await inputs.remove_unused(())
    assert copies(far) == []


async def test_the_copy_of_a_batch_that_has_chunks_here_stays(far: Yard, clock: Clock) -> None:
    inputs = Inputs(far.services, clock)
    batch_id = await prepared(far, "a")
    path = await inputs.path(batch_id)
    for clock.now in (KEPT_SECONDS, 1.9 * KEPT_SECONDS):
        await inputs.remove_unused({batch_id})
    clock.now = 2.8 * KEPT_SECONDS
    await inputs.remove_unused(())
    assert copies(far) == [path.name]


async def test_a_copy_that_another_batch_uses_stays(far: Yard, clock: Clock) -> None:
    inputs = Inputs(far.services, clock)
    first = await prepared(far, "a")
    file_id = (await far.services.store.batches.get(first)).input_file_id
    second = await create_batch(far.services, BatchRequest(input_file_id=file_id))
    path = await inputs.path(first)
    assert await inputs.path(second) == path
    clock.now = KEPT_SECONDS
    await inputs.remove_unused({second})
    assert copies(far) == [path.name]


async def test_nothing_is_removed_while_a_fetch_may_have_found_it(
    far: Yard, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there when it is looked for is there when it is opened."""
    inputs = Inputs(far.services, clock)
    first, second = await prepared(far, "a"), await prepared(far, "b")
    path = await inputs.path(first)
    hold = asyncio.Event()
    real = far.services.storage.local_path

    async def slow(key: str, spool: Path) -> Path:
        await hold.wait()
        return await real(key, spool)

    monkeypatch.setattr(far.services.storage, "local_path", slow)
    fetching = asyncio.create_task(inputs.path(second))
    await asyncio.sleep(0)
    clock.now = KEPT_SECONDS
    await inputs.remove_unused({second})
    assert copies(far) == [path.name]
    hold.set()
    await fetching
    await inputs.remove_unused({second})
    assert path.name not in copies(far)


async def test_what_was_removed_is_fetched_again(far: Yard, clock: Clock) -> None:
    inputs = Inputs(far.services, clock)
    batch_id = await prepared(far, "a")
    path = await inputs.path(batch_id)
    content = path.read_bytes()
    clock.now = KEPT_SECONDS
    await inputs.remove_unused(())
    assert (await inputs.path(batch_id)).read_bytes() == content


async def test_an_object_that_is_a_local_file_stays(yard: Yard, clock: Clock) -> None:
    """It is no copy."""
    inputs = Inputs(yard.services, clock)
    path = await inputs.path(await prepared(yard, "a"))
    clock.now = KEPT_SECONDS
    await inputs.remove_unused(())
    assert path.is_file()


async def test_a_runner_of_the_pool_removes_inputs_that_it_needs_no_more(
    far: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.0)
    far.set(runner_idle_seconds=3600.0)
    batch_id = await prepared(far, "a")
    running = asyncio.create_task(run_chunks(far.services, "stub-model"))

    async def is_done() -> bool:
        return (await far.services.store.chunks.summary(batch_id)).done == 1

    async def is_removed() -> bool:
        return not copies(far)

    try:
        await until(is_done)
        await until(is_removed)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_of_many_batches_the_latest_are_remembered(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner may live for months."""
    monkeypatch.setattr("batchyard.runner.chunk.batch_traits._MOST_BATCHES", 2)

    async def nothing(_: object) -> None:
        pass

    traits = TraitsOfBatches(yard.services, nothing)
    for name in "abc":
        await traits.of(await prepared(yard, name))
    assert len(traits._traits) == 2
