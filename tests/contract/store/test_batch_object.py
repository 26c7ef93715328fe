"""The Batch object that clients see, for every way in which a batch can end."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchOptions
from batchyard.wire import RequestCounts, to_json
from tests.contract.store.samples import USAGE, begin, begun_batch, finish, new_batch, new_file

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, Store

S = BatchStatus

KEYS = [
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
]
ZERO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def seen(batch: BatchRecord) -> dict[str, Any]:
    return msgspec.json.decode(to_json(batch.to_wire()))


def timestamps(batch: BatchRecord) -> set[str]:
    """Which are set, besides ``created_at`` and ``expires_at``."""
    wire = seen(batch)
    return {key for key in KEYS if key.endswith("_at") and wire[key] is not None} - {
        "created_at",
        "expires_at",
    }


async def test_a_new_batch_has_every_key_in_order_and_the_rest_null(store: Store) -> None:
    new = new_batch(metadata={"project": "x"})
    wire = seen(await store.batches.create(new))
    assert list(wire) == KEYS
    assert wire == dict.fromkeys(KEYS) | {
        "id": new.id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "input_file_id": new.input_file_id,
        "completion_window": "24h",
        "status": "validating",
        "created_at": wire["created_at"],
        "expires_at": wire["created_at"] + 86_400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": ZERO_USAGE,
        "metadata": {"project": "x"},
    }


async def test_completed_shows_its_files_and_totals(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    output = new_file()
    counts = RequestCounts(10, 10, 0)
    ended = await finish(store, batch.id, S.COMPLETED, output=output, counts=counts, usage=USAGE)
    wire = seen(ended)
    assert timestamps(ended) == {"in_progress_at", "finalizing_at", "completed_at"}
    assert (wire["output_file_id"], wire["error_file_id"]) == (output.id, None)
    assert wire["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    assert wire["usage"] == {
        "input_tokens": 70,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 20},
        "total_tokens": 100,
    }


async def test_who_asked_for_it_sees_how_many_requests_share_an_answer(store: Store) -> None:
    batch = await begun_batch(store, options=BatchOptions(deduplicate=True))
    assert seen(batch)["usage"]["deduplicated_requests"] == 0
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    ended = await finish(store, batch.id, S.COMPLETED, usage=USAGE, deduplicated_requests=7)
    assert ended.deduplicated_requests == 7
    assert list(seen(ended)["usage"]) == [*ZERO_USAGE, "deduplicated_requests"]
    assert seen(ended)["usage"]["deduplicated_requests"] == 7


async def test_failed_shows_its_error_list(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    ended = await store.batches.fail(batch.id, [BatchError("invalid_url", "No.", "url", 7)])
    assert timestamps(ended) == {"failed_at"}
    assert seen(ended)["errors"] == {
        "data": [{"code": "invalid_url", "message": "No.", "param": "url", "line": 7}],
        "object": "list",
    }


async def test_cancelled_while_validating_has_two_timestamps(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    await store.batches.advance(batch.id, S.VALIDATING, S.CANCELLING)
    ended = await finish(store, batch.id, S.CANCELLED)
    assert timestamps(ended) == {"cancelling_at", "cancelled_at"}


async def test_cancelled_in_progress_was_never_finalizing(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING)
    error = new_file()
    ended = await finish(store, batch.id, S.CANCELLED, error=error, counts=RequestCounts(10))
    assert timestamps(ended) == {"in_progress_at", "cancelling_at", "cancelled_at"}
    assert seen(ended)["request_counts"] == {"total": 10, "completed": 0, "failed": 0}
    assert (ended.output_file_id, ended.error_file_id) == (None, error.id)


async def test_expired_was_finalizing_first(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    ended = await finish(store, batch.id, S.EXPIRED)
    assert timestamps(ended) == {"in_progress_at", "finalizing_at", "expired_at"}


async def test_a_timestamp_once_set_never_changes(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    states = [batch, await begin(store, batch.id)]
    states.append(await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING))
    states.append(await finish(store, batch.id, S.COMPLETED))
    for earlier, later in pairwise(states):
        kept = {"created_at", "expires_at", *timestamps(earlier)}
        assert {key: seen(later)[key] for key in kept} == {key: seen(earlier)[key] for key in kept}
        assert len(timestamps(later)) == len(timestamps(earlier)) + 1


@pytest.mark.parametrize("window", ["24h", "1h", "P7D", " 24 h "])
async def test_the_completion_window_is_echoed_as_it_came(store: Store, window: str) -> None:
    batch = await store.batches.create(new_batch(completion_window=window))
    assert seen(batch)["completion_window"] == window
