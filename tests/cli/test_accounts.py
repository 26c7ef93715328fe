"""``tenants usage`` and ``audit``, and what a batch cost in ``show`` and ``list``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from batchyard.batch.prices import Price, Prices
from batchyard.cli.batches.watch import _look, _message
from batchyard.cli.terminal.offline import offline_services
from batchyard.lifecycle import BatchStatus
from batchyard.settings import read_settings
from batchyard.wire import RequestCounts
from tests.cli.conftest import Ended, with_store
from tests.contract.store.samples import MODEL, USAGE, begun_batch, finish
from tests.pages import block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.store import Store

    Run = Callable[..., Ended]


ACCOUNTS = "docs/how-to/accounts.md"


@pytest.fixture
def priced(alone: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """A batch that ended with a price; its id."""
    monkeypatch.setenv("BATCHYARD_PRICES", '{"*": {"input": 1000, "cached": 0, "output": 2000}}')
    monkeypatch.setenv("BATCHYARD_CURRENCY", "EUR")

    async def work(store: Store) -> str:
        batch = await begun_batch(store, tenant="search")
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        counts = RequestCounts(10, 9, 1)
        await finish(store, batch.id, BatchStatus.COMPLETED, counts=counts, usage=USAGE)
        return batch.id

    return with_store(work)


def test_a_batch_shows_what_it_cost(alone: Run, priced: str) -> None:
    assert "  cost      0.090000 EUR" in alone("show", priced).stdout
    usage = json.loads(alone("show", priced, "--json").stdout)["usage"]
    assert usage["cost"] == {"value": 0.09, "currency": "eur"}
    head, row = alone("list", "--all").stdout.splitlines()
    assert head.split()[-1] == "cost"
    assert row.rstrip().endswith("0.090000 EUR")


@pytest.fixture
def running(priced: str) -> str:
    """A batch that goes on, and has answers that cost something; its id."""

    async def work(store: Store) -> str:
        batch = await begun_batch(store, tenant="search")
        (lease,) = await store.chunks.claim(
            model=MODEL, owner="r", lease_seconds=60, batch_id=batch.id
        )
        await store.chunks.record_progress(lease, completed=4, failed=0, usage=USAGE)
        return batch.id

    return with_store(work)


def test_a_running_batch_shows_what_it_costs_so_far(alone: Run, running: str) -> None:
    assert "  cost      0.090000 EUR so far" in alone("show", running).stdout
    usage = json.loads(alone("show", running, "--json").stdout)["usage"]
    assert usage["cost_so_far"] == {"value": 0.09, "currency": "eur"}
    assert "cost" not in usage
    _, row = alone("list").stdout.splitlines()
    assert row.rstrip().endswith("0.090000 EUR so far")


def test_a_watched_batch_shows_what_it_costs_so_far(running: str) -> None:
    async def look() -> str:
        async with offline_services() as services:
            await services.store.batch_schedule.pause(running)
            return _message(*await _look(services, running))

    assert asyncio.run(look()) == "paused, 0.090000 EUR so far"


def test_without_prices_nothing_is_said_of_costs(alone: Run) -> None:
    async def work(store: Store) -> str:
        return (await begun_batch(store)).id

    batch_id = with_store(work)
    assert "cost" not in alone("show", batch_id).stdout
    assert "cost" not in alone("list").stdout


NUMBERS = ["requests", "input", "cached", "output", "cost"]


def test_usage_is_listed_by_tenant_and_model(alone: Run, priced: str) -> None:
    head, row = alone("tenants", "usage").stdout.splitlines()
    assert head.split() == ["tenant", "model", "kind", *NUMBERS]
    assert row.split() == ["search", MODEL, "batch", "10", "70", "40", "30", "0.090000", "EUR"]
    assert alone("tenants", "usage", "other").stdout.splitlines()[1:] == []
    assert alone("tenants", "usage", "--daily").stdout.split()[0] == "day"
    (line,) = alone("tenants", "usage", "--daily", "--json").stdout.splitlines()
    found = json.loads(line)
    assert len(found.pop("day")) == 10
    assert found == {
        "tenant": "search",
        "model": MODEL,
        "is_live": False,
        "currency": "eur",
        "requests": 10,
        "input_tokens": 70,
        "cached_tokens": 40,
        "output_tokens": 30,
        "reasoning_tokens": 20,
        "total_tokens": 100,
        "cost": 0.09,
    }


def test_the_prices_of_the_page_are_settings(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "batchyard.toml").write_text(block(ACCOUNTS, "prices"))
    prices = read_settings().price_table
    assert prices == Prices(
        currency="eur",
        by_model={
            "tiny-chat": Price(input=0.1, cached=0.02, output=0.4),
            "*": Price(engine_hour=2.5),
        },
    )


def test_the_page_shows_what_the_command_prints(alone: Run, priced: str) -> None:
    command, *shown = block(ACCOUNTS, "usage").splitlines()
    said = alone(*command.removeprefix("$ batchyard ").split()).stdout.splitlines()
    assert [line.rstrip() for line in said] == shown


def test_the_audit_log_is_listed_as_the_page_says(alone: Run) -> None:
    alone("keys", "create", "laptop")
    for line in block(ACCOUNTS, "audit").splitlines():
        ended = alone(*line.removeprefix("batchyard ").split())
        assert "key.created" in ended.stdout


def test_a_price_that_is_none_stops_the_start(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ('{"m": {"input": -1}}', '{"m": {"inputs": 1}}', '{"m": {"input": "Infinity"}}'):
        monkeypatch.setenv("BATCHYARD_PRICES", wrong)
        ended = alone("list")
        assert ended.status == 1
        assert "BATCHYARD_PRICES" in ended.stderr


def test_commands_are_recorded_with_the_user_and_the_machine(alone: Run) -> None:
    made = alone("keys", "create", "lap\x1btop", "--operator")
    alone("quota", "search", "--active-batches", "5")
    alone("keys", "list")
    lines = [json.loads(line) for line in alone("audit", "--json").stdout.splitlines()]
    assert {each["action"] for each in lines} == {"key.created", "tenant.quota"}
    for each in lines:
        user, _, machine = each["actor"].partition("@")
        assert user
        assert machine
    shown = alone("audit", "--action", "key").stdout
    assert "key.created" in shown
    assert "tenant.quota" not in shown
    assert made.stdout.strip() not in shown
    assert "\x1b" not in shown
    assert len(alone("audit", "--limit", "1", "--json").stdout.splitlines()) == 1
