"""Changing the key that seals secrets, while old and new processes are at work."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StoreError
from batchyard.store import BatchLocations, RunnerKind, Store, new_sealing_key, open_store
from tests.cli.conftest import Ended, with_store
from tests.contract.store.samples import new_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Run = Callable[..., Ended]

URL = "https://bucket.example.com/in?signature=abc"


@pytest.fixture
def home(alone: Run, tmp_path: Path) -> Path:
    """With a database, a key, and a batch whose input is sealed with it."""
    with_store(sealed)
    return tmp_path / "home"


async def sealed(store: Store) -> str:
    """A new batch whose input is sealed; its id."""
    return (await store.batches.create(new_batch(locations=BatchLocations(URL)))).id


async def opened(store: Store) -> int:
    """How many inputs there are, each of which can be opened."""
    found = await store.batches.page(limit=100)
    for batch in found:
        assert (await store.batch_places.locations(batch.id)).input == URL
    return len(found)


def process(home: Path) -> AbstractAsyncContextManager[Store]:
    """The store of a process that starts now: it reads the keys this once."""
    keys = keys_in(home)
    return open_store(f"sqlite:///{home / 'batchyard.db'}", keys=keys)


def keys_in(home: Path) -> list[str]:
    files = [home / "secret.key", home / "secret.next.key"]
    return [key for file in files if file.exists() for key in file.read_text().split()]


def rotate(alone: Run, step: int) -> str:
    ended = alone("secrets", "rotate", *(("--restarted",) if step > 1 else ()))
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"{step} of 3: ")
    return ended.stdout


async def test_no_process_ever_meets_what_it_cannot_open(alone: Run, home: Path) -> None:
    """Each is restarted once between two steps, one before the other.

    They write before, between and after the steps, and read what the others wrote.
    """

    async def step(number: int) -> None:
        await asyncio.to_thread(rotate, alone, number)

    async with process(home) as before:
        await step(1)
        await sealed(before)
        async with process(home) as first:
            for store in (before, first):
                await sealed(store)
            for store in (before, first):
                await opened(store)
    async with process(home) as first:
        await step(2)
        await sealed(first)
        async with process(home) as second:
            for store in (first, second):
                await sealed(store)
            for store in (first, second):
                await opened(store)
    async with process(home) as second:
        await step(3)
        await sealed(second)
        async with process(home) as last:
            await sealed(last)
            assert await opened(second) == await opened(last)
            assert await opened(last) == 9
    assert len(keys_in(home)) == 1


def test_three_steps_leave_one_new_key(alone: Run, home: Path) -> None:
    (old,) = keys_in(home)
    rotate(alone, 1)
    assert keys_in(home)[0] == old
    new = keys_in(home)[1]
    rotate(alone, 2)
    assert keys_in(home) == [new, old]
    rotate(alone, 3)
    assert keys_in(home) == [new]
    assert stat.S_IMODE((home / "secret.key").stat().st_mode) == 0o600
    assert sorted(each.name for each in home.iterdir() if "secret" in each.name) == ["secret.key"]
    assert with_store(opened) == 1


async def test_afterwards_the_old_key_opens_nothing(alone: Run, home: Path) -> None:
    (old,) = keys_in(home)
    for step in (1, 2, 3):
        await asyncio.to_thread(rotate, alone, step)
    async with open_store(f"sqlite:///{home / 'batchyard.db'}", keys=[old]) as store:
        with pytest.raises(StoreError, match="sealing keys"):
            await opened(store)


def test_no_key_is_ever_printed(alone: Run, home: Path) -> None:
    said, keys = "", set(keys_in(home))
    for step in (1, 2, 3):
        said += rotate(alone, step)
        keys |= set(keys_in(home))
    assert len(keys) == 2
    assert not any(key in said for key in keys)


def test_each_step_says_what_comes_next(alone: Run, home: Path) -> None:
    assert "Restart every process" in rotate(alone, 1)
    second = rotate(alone, 2)
    assert "1 values" in second
    assert "Restart every process" in second
    assert "old key removed" in rotate(alone, 3)


def test_no_step_is_taken_by_mistake(alone: Run, home: Path) -> None:
    """Nobody sees whether the API was restarted: somebody has to say so."""
    ended = alone("secrets", "rotate", "--restarted")
    assert (ended.status, ended.stdout) == (1, "")
    assert "No rotation has begun" in ended.stderr
    rotate(alone, 1)
    for step in (2, 3):
        before = keys_in(home)
        ended = alone("secrets", "rotate")
        assert (ended.status, ended.stdout) == (1, "")
        assert "then run: batchyard secrets rotate --restarted" in ended.stderr
        assert keys_in(home) == before
        rotate(alone, step)
    assert len(keys_in(home)) == 1


def test_a_second_step_that_was_cut_off_is_done_again(alone: Run, home: Path) -> None:
    """The new key seals already, but not everything has been sealed anew."""
    rotate(alone, 1)
    old, new = keys_in(home)
    (home / "secret.key").write_text(f"{new}\n{old}\n")
    rotate(alone, 2)
    assert keys_in(home) == [new, old]
    rotate(alone, 3)
    assert with_store(opened) == 1


@pytest.mark.parametrize("kind", list(RunnerKind))
def test_a_runner_that_was_not_restarted_stops_the_next_step(
    alone: Run, home: Path, kind: RunnerKind
) -> None:
    runner = with_store(lambda store: store.runners.register(kind=kind, pool="control", model="m"))
    rotate(alone, 1)
    before = keys_in(home)
    ended = alone("secrets", "rotate", "--restarted")
    assert (ended.status, ended.stdout) == (1, "")
    assert f"do not have its keys: {runner.id}. Restart every process" in ended.stderr
    assert keys_in(home) == before
    # As if the step had been long before the runner started.
    os.utime(home / "secret.next.key", (0, 0))
    rotate(alone, 2)
    assert "Restart every process" in alone("secrets", "rotate", "--restarted").stderr


def test_keys_of_the_settings_are_not_made_but_used(
    alone: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is sealed anew with the first one; the others may go then."""
    (old,) = keys_in(home)
    new = new_sealing_key()
    monkeypatch.setenv("BATCHYARD_SECRET_KEY", f"{new},{old}")
    ended = alone("secrets", "rotate")
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.stdout.startswith("1 values are encrypted with the first key")
    monkeypatch.setenv("BATCHYARD_SECRET_KEY", new)
    assert with_store(opened) == 1
    assert keys_in(home) == [old]


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "-i", "in.jsonl", "-o", "out.jsonl"),
        ("serve", "--port", "0"),
        ("list",),
    ],
)
def test_a_machine_with_another_key_is_refused_before_anything_is_made(
    alone: Run, home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """What it sealed, nobody else could open; what others sealed, it could not."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("BATCHYARD_SECRET_KEY", new_sealing_key())
        ended = alone(*words)
    assert (ended.status, ended.stdout) == (1, "")
    assert "with another key than the keys in BATCHYARD_SECRET_KEY" in ended.stderr
    assert "needs the same BATCHYARD_SECRET_KEY" in ended.stderr
    assert with_store(opened) == 1


def test_a_key_file_that_is_not_the_databases_is_named(alone: Run, home: Path) -> None:
    (home / "secret.key").write_text(new_sealing_key())
    ended = alone("list")
    assert ended.status == 1
    assert f"than the key file {home / 'secret.key'}" in ended.stderr


def test_a_lost_key_can_be_replaced(alone: Run, home: Path) -> None:
    """What was sealed with it is lost, the rest is not."""
    (home / "secret.key").unlink()
    assert alone("list").status == 1
    ended = alone("secrets", "adopt")
    assert (ended.status, ended.stderr) == (0, "")
    assert alone("list").status == 0
    assert "nothing to do" in alone("secrets", "adopt").stdout


def test_webhook_endpoints_of_a_lost_key_are_listed_repaired_and_deleted(
    alone: Run, home: Path
) -> None:
    """One of them hides none of another tenant's."""
    for name in ("first", "second"):
        alone("webhooks", "create", "https://hooks.example.com/old", "--name", name)
    (home / "secret.key").unlink()
    alone("secrets", "adopt")
    alone("webhooks", "create", "https://hooks.example.com/new", "--tenant", "other")
    listed = [json.loads(line) for line in alone("webhooks", "list", "--json").stdout.splitlines()]
    # Those of one second come in no order.
    lost = [each for each in listed if each["url"] != "https://hooks.example.com/new"]
    assert (len(listed), len(lost)) == (3, 2)
    first, second = (each["id"] for each in lost)
    for each in lost:
        assert "lost with its key" in each["url"]
        assert "batchyard webhooks update --url" in each["url"]
    assert "lost with its key" in alone("webhooks", "list").stdout.replace("\n", " ")
    refused = alone("webhooks", "test", first)
    assert refused.status != 0
    assert "no key can decrypt its URL any more: set a new URL" in refused.stderr
    repaired = alone("webhooks", "update", first, "--url", "https://hooks.example.com/again")
    assert json.loads(repaired.stdout)["url"] == "https://hooks.example.com/again"
    assert "make a new secret" in alone("webhooks", "test", first).stderr
    assert alone("webhooks", "rotate", first).status == 0
    assert alone("webhooks", "delete", second).status == 0


def test_keys_can_be_rotated_after_one_was_lost(alone: Run, home: Path) -> None:
    """What only the lost key decrypts is counted and stays."""
    (home / "secret.key").unlink()
    assert alone("secrets", "adopt").status == 0
    rotate(alone, 1)
    for step in (2, 3):
        assert "1 values were left as they are" in rotate(alone, step)
    assert len(keys_in(home)) == 1
