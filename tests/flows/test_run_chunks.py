"""run-chunks: what keeps a runner from serving costs its machine a pause, and no batch its end."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.dispatch.run_states import MACHINE_PAUSED, NO_ENGINE, PUT_OFF, STOPPED
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import ModelNotFound, SettingsError
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.services import services as services_module
from batchyard.services.services import as_current, current_services, open_services
from batchyard.settings import read_settings
from batchyard.store import RunnerKind, open_store
from flows.process.stop_signal import STOP
from flows.run_chunks import run_chunks
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from prefect.states import State

    from batchyard.engine.base import Engine
    from tests.flows.conftest import OpenYard

MODEL = "stub-model"


async def run() -> State:
    state: State = await run_chunks(MODEL, return_state=True)
    return state


async def test_an_engine_that_does_not_start_pauses_its_machine(open_yard: OpenYard) -> None:
    engine = StubEngine(start_failures=9)
    async with open_yard(engine, runners="pool", machine="gpu-c"):
        first, second = await run(), await run()
    assert first.is_failed()
    assert str(first.message).startswith("On gpu-c: ")
    assert (second.is_completed(), second.name) == (True, MACHINE_PAUSED)
    assert engine.starts == 1


class EndlessStart(StubEngine):
    """Its process is told to stop while it loads its model."""

    async def start(self, on_progress: object = None) -> None:  # noqa: ARG002 - as an engine
        os.kill(os.getpid(), STOP)
        await asyncio.Event().wait()


async def test_a_pod_that_is_stopped_while_it_loads_counts_against_nothing(
    open_yard: OpenYard,
) -> None:
    """Neither against its model nor against its machine: the next runner starts at once."""
    async with open_yard(EndlessStart(), runners="pool", machine="gpu-c") as services:
        state = await run()
        store, identity = services.store, services.settings.this_machine.identity
        failed = await store.runners.failures(model=MODEL, pool="gpu", machine=identity)
        live = await store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
    assert (state.is_completed(), state.name) == (True, STOPPED)
    assert (failed.count, live) == (0, [])


class DrainedStart(StubEngine):
    """While it waits for its nodes, the scheduler wants its place for another model."""

    async def start(self, on_progress: object = None) -> None:  # noqa: ARG002 - as an engine
        store = current_services().store
        (row,) = await store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
        await store.runners.drain(row.id)
        await asyncio.Event().wait()


async def test_a_runner_that_is_drained_while_it_loads_ends_at_once(open_yard: OpenYard) -> None:
    """It counts against nothing. Nodes may be waited for for half an hour."""
    async with open_yard(DrainedStart(), runners="pool", machine="gpu-c") as services:
        async with asyncio.timeout(PATIENCE * 10):
            state = await run()
        store, identity = services.store, services.settings.this_machine.identity
        failed = await store.runners.failures(model=MODEL, pool="gpu", machine=identity)
        live = await store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
    assert (state.is_completed(), state.name) == (True, PUT_OFF)
    assert (failed.count, live) == (0, [])


async def test_an_engine_that_starts_serves(open_yard: OpenYard) -> None:
    async with open_yard(runners="pool", runner_idle_seconds=0):
        state = await run()
    assert (state.name, state.message) == ("Completed", "0 requests answered")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ModelNotFound("create a block"), NO_ENGINE),
        (SettingsError("no weights there"), "Failed"),
        (MemoryError(), "Failed"),
        (KeyError("prompt"), "Failed"),
    ],
)
async def test_what_keeps_an_engine_from_being_made_is_named(
    tmp_path: Path, error: Exception, name: str
) -> None:
    async def engine_for(_: str) -> Engine:
        raise error

    settings = read_settings(home=tmp_path / "home", machine="gpu-c")
    async with open_services(settings, engine_for=engine_for):
        state = await run()
    assert state.name == name
    assert "prompt" not in str(state.message)
    if name == "Failed":
        assert str(state.message).startswith("On gpu-c: ")


async def test_outside_of_the_hours_of_its_engine_a_runner_is_put_off(open_yard: OpenYard) -> None:
    """That counts neither against its model nor against its machine, and starts no engine."""
    leap_days = Hours((HoursWindow("0 0 29 2 *", "1h", timezone="Europe/Berlin"),))

    async def hours_of(_: str) -> Hours:
        return leap_days

    engine = StubEngine()
    async with open_yard(engine, runners="pool", machine="gpu-c") as services:
        with as_current(replace(services, hours_of=hours_of)):
            state = await run()
        hours, _ = await services.store.engine_hours.of(MODEL)
    assert (state.is_completed(), state.name) == (True, PUT_OFF)
    assert str(state.message).startswith(f"It waits: the hours of engine {MODEL} begin on ")
    assert engine.starts == 0
    assert hours == leap_days


async def test_newer_tables_put_the_runner_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    async with open_store(f"sqlite:///{tmp_path}/batchyard.db", migrate=True):
        pass
    with sqlite3.connect(tmp_path / "batchyard.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    state = await run()
    assert (state.is_completed(), state.name) == (True, PUT_OFF)
    assert "newer than this version" in str(state.message)


async def test_older_tables_put_the_runner_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a database that others use are changed by `batchyard migrate` only."""
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", f"sqlite:///{tmp_path}/shared.db")
    state = await run()
    assert (state.is_completed(), state.name) == (True, PUT_OFF)
    assert "no tables yet: run `batchyard migrate`" in str(state.message)


async def test_a_home_without_room_puts_the_runner_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    monkeypatch.setattr(services_module, "_LEAST_ROOM_BYTES", 2**62)
    state = await run()
    assert (state.is_completed(), state.name) == (True, PUT_OFF)
    assert "has no room" in str(state.message)
