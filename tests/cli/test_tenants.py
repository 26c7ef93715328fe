"""``batchyard tenants``: who has batches here, their limits, addresses and use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchyard.lifecycle import BatchStatus
from batchyard.wire import RequestCounts
from tests.cli.conftest import Ended, with_store
from tests.contract.store.samples import USAGE, begun_batch, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batchyard.store import Store

    Run = Callable[..., Ended]


def objects(ended: Ended) -> list[dict[str, Any]]:
    assert (ended.status, ended.stderr) == (0, "")
    return [json.loads(line) for line in ended.stdout.splitlines()]


async def some_use(store: Store) -> None:
    """One tenant with a running batch, and one with an ended one."""
    await begun_batch(store, tenant="search")
    batch = await begun_batch(store, tenant="red")
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    counts = RequestCounts(10, 9, 1)
    await finish(store, batch.id, BatchStatus.COMPLETED, counts=counts, usage=USAGE)


def test_all_tenants_are_listed_with_their_use_limits_keys_and_addresses(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_QUOTA__ENQUEUED_TOKENS", "5000")
    with_store(some_use)
    alone("keys", "create", "laptop", "--tenant", "only-a-key")
    alone("tenants", "email", "me@example.com", "--tenant", "search")
    alone("tenants", "quota", "search", "--active-batches", "20")
    head, *lines = alone("tenants", "list").stdout.splitlines()
    assert head.split()[0] == "tenant"
    assert [" ".join(line.split()) for line in lines] == [
        "only-a-key 0 0 0 of 5,000 0 1 -",
        "red 0 0 0 of 5,000 0 0 -",
        "search 1 of 20 10 70 of 5,000 0 0 me@example.com",
    ]
    (_, _, search) = objects(alone("tenants", "list", "--json"))
    assert search == {
        "tenant": "search",
        "used": {
            "active_batches": 1,
            "enqueued_requests": 10,
            "enqueued_tokens": 70,
            "stored_bytes": 0,
        },
        "limits": {
            "max_active_batches": 20,
            "max_enqueued_requests": None,
            "max_enqueued_tokens": 5000,
            "max_live_requests": 0,
            "max_stored_bytes": None,
            "when_full": "refuse",
        },
        "keys": 0,
        "notify_email": "me@example.com",
    }


def test_a_revoked_key_is_not_counted(alone: Run) -> None:
    made = alone("keys", "create", "laptop", "--tenant", "red", "--json")
    alone("keys", "revoke", json.loads(made.stdout)["id"])
    (red,) = objects(alone("tenants", "list", "--json"))
    assert (red["tenant"], red["keys"]) == ("red", 0)


def test_of_keys_with_an_end_only_those_are_counted_that_have_not_expired(alone: Run) -> None:
    with_store(lambda store: store.api_keys.create("red", "old", expires_at=1))
    alone("keys", "create", "new", "--tenant", "red", "--expires-in", "30d")
    (red,) = objects(alone("tenants", "list", "--json"))
    assert (red["tenant"], red["keys"]) == ("red", 1)


def test_the_earlier_names_of_quota_and_email_still_work(alone: Run) -> None:
    assert alone("quota", "red").stdout == alone("tenants", "quota", "red").stdout
    assert alone("email").stdout == alone("tenants", "email").stdout == "none\n"
