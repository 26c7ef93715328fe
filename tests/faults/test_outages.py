"""Our own storage or database away for a while: a batch waits, and is never failed for it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import StorageUnavailable, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.services import patience
from batchyard.services.leases import held_batches
from batchyard.storage.local import LocalStorage
from tests.faults.site import lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable
    from pathlib import Path

    from batchyard.storage.base import StoredObject
    from batchyard.store import BatchRecord
    from tests.faults.site import Site


class AbsentStorage(LocalStorage):
    """Takes no object of this kind the first ``failures`` times. ``asked_at``: when, each time."""

    def __init__(self, root: Path, is_refused: Callable[[str], bool], failures: int) -> None:
        super().__init__(root)
        self.asked_at: list[float] = []
        self._is_refused = is_refused
        self._failures = failures

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        if self._is_refused(key) and len(self.asked_at) < self._failures:
            self.asked_at.append(time.monotonic())
            raise StorageUnavailable("The object store is away.")
        return await super().put(key, parts)


@pytest.mark.parametrize(
    "is_refused",
    [
        pytest.param(lambda key: key.startswith("files/") and "." in key, id="a result file"),
        pytest.param(lambda key: "/plan." in key, id="the plan"),
    ],
)
async def test_a_batch_whose_objects_cannot_be_stored_is_tried_again_after_a_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[str], bool]
) -> None:
    monkeypatch.setattr(held_batches, "AGAIN_AFTER_SECONDS", 0.5)
    storage = AbsentStorage(site.services.settings.home_folder / "objects", is_refused, failures=3)
    services = replace(site.services, storage=storage)
    async with site.working(StubEngine(), services=services, controls=2):
        asked = await site.create(lines(20))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
        await site.check(asked)
    assert len(storage.asked_at) == 3
    assert all(after - before >= 0.5 for before, after in pairwise(storage.asked_at))


async def test_finished_lines_that_cannot_be_stored_wait_in_the_runner(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.1)
    home = site.services.settings.home_folder
    storage = AbsentStorage(home / "objects", lambda key: "/segments/" in key, failures=3)
    engine = StubEngine()
    services = replace(site.services, storage=storage)
    async with site.working(engine, services=services):
        asked = await site.create(lines(20))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
        await site.check(asked)
    assert len(storage.asked_at) == 3
    assert engine.executed == 20


async def test_a_database_that_is_away_for_a_while_ends_no_runner(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.1)
    calls = itertools.count()
    chunks = site.services.store.chunks
    complete = chunks.complete

    async def away_at_first(*args: Any, **values: Any) -> None:
        if next(calls) < 3:
            raise StoreUnavailable("The database is away.")
        await complete(*args, **values)

    monkeypatch.setattr(chunks, "complete", away_at_first)
    engine = StubEngine()
    async with site.working(engine):
        asked = await site.create(lines(20))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
    assert (engine.executed, engine.starts) == (20, 1)


async def test_a_busy_database_fails_no_batch_while_it_is_validated(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_batches, "AGAIN_AFTER_SECONDS", 0.1)
    calls = itertools.count()
    begin = site.services.store.batches.begin

    async def busy_once(*args: Any, **values: Any) -> BatchRecord:
        if next(calls) == 0:
            raise StoreUnavailable("The database is busy.")
        return await begin(*args, **values)

    monkeypatch.setattr(site.services.store.batches, "begin", busy_once)
    async with site.working(StubEngine()):
        asked = await site.create(lines(5))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
