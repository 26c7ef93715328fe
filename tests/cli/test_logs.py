"""``batchyard logs``: what has happened to a batch, and no word of what is in it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.actions import LogCreate

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchLocations, DeliveryKind
from batchyard.wire import RequestCounts
from tests.cli.conftest import Ended, Terminal, with_store
from tests.contract.store.samples import begun_batch, finish, new_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batchyard.store import Store

    Run = Callable[..., Ended]


def entries(ended: Ended) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_the_statuses_of_a_batch_are_in_their_order(alone: Run) -> None:
    async def work(store: Store) -> str:
        batch = await begun_batch(store)
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        counts = RequestCounts(10, 9, 1)
        return (await finish(store, batch.id, BatchStatus.COMPLETED, counts=counts)).id

    ended = alone("logs", with_store(work), "--json")
    assert [each["text"] for each in entries(ended)] == [
        "created, 24h",
        "in_progress, 10 requests of model qwen",
        "finalizing",
        "completed, 9 succeeded, 1 failed",
    ]
    assert ended.stderr == "batchyard: Prefect's logs are left out: PREFECT_API_URL is not set.\n"


def test_errors_are_codes_and_have_no_words_of_the_input(alone: Run) -> None:
    async def work(store: Store) -> str:
        batch = await store.batches.create(new_batch())
        error = BatchError("model_not_found", "The model canary is not offered.", line=3)
        return (await store.batches.fail(batch.id, [error])).id

    batch_id = with_store(work)
    ended = alone("logs", batch_id)
    assert "model_not_found in line 3" in ended.stdout
    assert "canary" not in ended.stdout + alone("logs", batch_id, "--json").stdout


def test_notifications_are_there_without_their_urls(alone: Run) -> None:
    async def work(store: Store) -> str:
        receivers = {DeliveryKind.WEBHOOK: "https://example.com/hook?token=canary"}
        batch = await store.batches.create(new_batch(locations=BatchLocations(receivers=receivers)))
        return (await store.batches.fail(batch.id, [BatchError("empty_file", "No lines.")])).id

    ended = alone("logs", with_store(work), "--json")
    (due,) = [each for each in entries(ended) if each["source"] == "delivery"]
    assert due["text"].endswith(" of batch.failed: due")
    assert "canary" not in ended.stdout


def test_prefects_logs_of_the_batchs_own_flow_runs_are_among_them(
    terminal: Terminal, here: Run, engine_url: str
) -> None:
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url)
    assert ended.status == 0, ended.stderr
    batch = with_store(lambda store: store.batches.get(ended.batch_id))

    async def write() -> None:
        async with get_client() as client:
            for message in ("Beginning", "Finished"):
                now = datetime.now(UTC)
                about = {"flow_run_id": UUID(batch.flow_run_id), "timestamp": now}
                line = LogCreate(name="prefect.flow_runs", level=20, message=message, **about)
                await client.create_logs([line])

    asyncio.run(write())
    found = here("logs", ended.batch_id, "--json")
    assert found.stderr == ""
    assert {each["source"] for each in entries(found)} == {"batch", "prefect"}
    times = [each["at"] for each in entries(found)]
    assert times == sorted(times)
    newest = list(entries(here("logs", ended.batch_id, "--limit", "1", "--json")))
    assert len([each for each in newest if each["source"] == "prefect"]) == 1


def test_a_prefect_that_is_away_costs_only_its_logs(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = with_store(begun_batch).id
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    ended = alone("logs", batch_id)
    assert ended.status == 0
    assert "in_progress" in ended.stdout
    assert "Prefect's logs are left out: The Prefect server at" in ended.stderr


def test_a_batch_that_does_not_exist_has_no_logs(alone: Run) -> None:
    assert alone("logs", "batch_0").status == 4
