"""Measured rates: moving averages for each model and pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.store.samples import MODEL

if TYPE_CHECKING:
    from batchyard.store import Store


async def test_the_first_measurement_is_kept_as_it_is(store: Store) -> None:
    await store.rates.record(MODEL, "gpu", tokens_per_second=2000.0, load_seconds=90.0)
    rate = await store.rates.get(MODEL, "gpu")
    assert rate is not None
    assert (rate.tokens_per_second, rate.load_seconds) == (2000.0, 90.0)
    assert abs(rate.measured_at - await store.database.now()) < 10


async def test_a_later_measurement_moves_the_average_by_three_tenths(store: Store) -> None:
    for tokens_per_second in (1000.0, 2000.0):
        await store.rates.record(MODEL, "gpu", tokens_per_second=tokens_per_second)
    rate = await store.rates.get(MODEL, "gpu")
    assert rate is not None
    assert rate.tokens_per_second == pytest.approx(1300)


async def test_what_was_not_measured_stays_as_it_was(store: Store) -> None:
    await store.rates.record(MODEL, "gpu", load_seconds=90.0)
    await store.rates.record(MODEL, "gpu", tokens_per_second=1000.0)
    await store.rates.record(MODEL, "gpu")
    rate = await store.rates.get(MODEL, "gpu")
    assert rate is not None
    assert (rate.tokens_per_second, rate.load_seconds) == (1000.0, 90.0)


async def test_each_model_has_a_rate_on_each_pool(store: Store) -> None:
    for model, pool in ((MODEL, "gpu"), (MODEL, "big"), ("llama", "gpu")):
        await store.rates.record(model, pool, tokens_per_second=1000.0)
    found = [(rate.model, rate.pool) for rate in await store.rates.all()]
    assert found == [("llama", "gpu"), (MODEL, "big"), (MODEL, "gpu")]


async def test_of_what_prompts_cost_the_last_measurement_counts(store: Store) -> None:
    for weight in (0.1, 0.2):
        await store.rates.record(
            MODEL, "gpu", prompt_weight=weight, prompt_tokens_per_second=1000 * weight
        )
    rate = await store.rates.get(MODEL, "gpu")
    assert rate is not None
    assert rate.prompt_weight == 0.2
    assert rate.prompt_tokens_per_second == pytest.approx(130)


async def test_what_was_never_measured_has_no_rate(store: Store) -> None:
    await store.rates.record(MODEL, "gpu")
    assert await store.rates.get(MODEL, "gpu") is None
    assert await store.rates.all() == []
