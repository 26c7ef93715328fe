"""Sealing anew: afterwards the first key alone opens everything."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.database.columns import Row
from batchyard.database.sealed import Sealed
from batchyard.errors import StoreError
from batchyard.lifecycle import BatchStatus
from batchyard.store import (
    BatchLocations,
    DeliveryKind,
    Resealed,
    new_sealing_key,
    open_store,
    reseal,
)
from tests.contract.store.outbox_samples import claim, endpoint, raw_rows
from tests.contract.store.samples import batch_in, new_batch

MOST = {"most_pending": 1}
LOCATIONS = BatchLocations(
    input="https://a.example/?canary",
    receivers={DeliveryKind.WEBHOOK: "https://b.example/?canary"},
)


async def test_the_older_key_may_go_afterwards(database_url: str, sealing_key: str) -> None:
    newer = new_sealing_key()
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
        its_id = await endpoint(store)
        await store.webhook_endpoints.rotate(its_id, keep_old=True)
        secrets = await store.webhook_endpoints.secrets(its_id)
        await store.tenants.rotate_webhook_secret("default", keep_old=False)
        salt = await store.cache_salts.get("tenant:default")
        ended = await batch_in(store, BatchStatus.COMPLETED)
        await store.deliveries.give_files(ended, {"output": "https://c.example/?canary"}, **MOST)
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[newer, sealing_key]) as store:
        # Two locations, the endpoint's URL and two secrets, the tenant's secret and salt, a
        # file's URL.
        assert await reseal(store.database) == Resealed(8)
        assert "canary" not in await raw_rows(store, "batches")
    async with open_store(database_url, keys=[newer]) as store:
        assert await store.batch_places.locations(batch.id) == LOCATIONS
        assert (await store.webhook_endpoints.get(its_id)).url.endswith("canary")
        assert await store.webhook_endpoints.secrets(its_id) == secrets
        assert await store.cache_salts.get("tenant:default") == salt
        (claimed,) = [each for each in await claim(store) if each.delivery.kind == "file"]
        assert str(claimed.url).endswith("canary")
        assert await store.sealing_proof.is_opened()
        assert await reseal(store.database) == Resealed(8)
    async with open_store(database_url, keys=[sealing_key]) as store:
        with pytest.raises(StoreError, match="None of the sealing keys"):
            await store.batch_places.locations(batch.id)


async def test_more_rows_than_one_transaction_has_are_all_sealed_anew(
    database_url: str, sealing_key: str
) -> None:
    newer = new_sealing_key()
    async with open_store(database_url, keys=[sealing_key]) as store:
        batches = [await store.batches.create(new_batch(locations=LOCATIONS)) for _ in range(230)]
        await store.batches.create(new_batch())
    async with open_store(database_url, keys=[newer, sealing_key]) as store:
        assert await reseal(store.database) == Resealed(460)
    async with open_store(database_url, keys=[newer]) as store:
        for batch in batches:
            assert await store.batch_places.locations(batch.id) == LOCATIONS


async def test_a_value_that_no_key_opens_is_an_error_and_stays(
    database_url: str, sealing_key: str
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        with pytest.raises(StoreError, match="None of the sealing keys"):
            await reseal(store.database)
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.batch_places.locations(batch.id) == LOCATIONS


async def test_what_was_sealed_with_a_lost_key_is_left_and_counted(
    database_url: str, sealing_key: str
) -> None:
    """Once another key is the database's, and only then."""
    adopted, newest = new_sealing_key(), new_sealing_key()
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
    async with open_store(database_url, keys=[adopted]) as store:
        await store.sealing_proof.adopt()
        later = await store.batches.create(new_batch(locations=LOCATIONS))
    async with open_store(database_url, keys=[newest]) as store:
        with pytest.raises(StoreError, match="None of the sealing keys"):
            await reseal(store.database)
    async with open_store(database_url, keys=[newest, adopted]) as store:
        assert await reseal(store.database) == Resealed(written=2, lost=2)
    async with open_store(database_url, keys=[newest]) as store:
        assert await store.batch_places.locations(later.id) == LOCATIONS
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.batch_places.locations(batch.id) == LOCATIONS


async def test_until_all_is_sealed_anew_the_older_key_is_the_databases(
    database_url: str, sealing_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, what is not sealed anew yet would be taken for lost."""
    newer = new_sealing_key()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.sealing_proof.is_opened()
        await endpoint(store)
    module = __import__("batchyard.database.reseal", fromlist=["update"])
    update = module.update

    def cut_off(table: Any) -> Any:
        if table.name == "webhook_endpoints":
            raise StoreError("The connection was lost.")
        return update(table)

    monkeypatch.setattr(module, "update", cut_off)
    async with open_store(database_url, keys=[newer, sealing_key]) as store:
        with pytest.raises(StoreError, match="connection was lost"):
            await reseal(store.database)
    async with open_store(database_url, keys=[newer]) as store:
        assert not await store.sealing_proof.is_opened()


async def test_with_nothing_sealed_there_is_nothing_to_do(database_url: str) -> None:
    async with open_store(database_url) as store:
        await store.batches.create(new_batch())
        assert await reseal(store.database) == Resealed(0)


def test_these_tables_have_sealed_columns() -> None:
    """A new one belongs into the first test as well."""
    sealed = {
        f"{table.name}.{column.name}"
        for table in Row.metadata.sorted_tables
        for column in table.c
        if isinstance(column.type, Sealed)
    }
    assert sealed == {
        "batches.input_location",
        "batches.output_location",
        "batches.error_location",
        "batch_receivers.destination",
        "cache_salts.salt",
        "tenants.webhook_secret",
        "tenants.old_webhook_secret",
        "webhook_endpoints.url",
        "webhook_endpoints.secret",
        "webhook_endpoints.old_secret",
        "sealing_proof.value",
        "deliveries.location",
        "live_engines.secret",
    }
