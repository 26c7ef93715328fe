"""What is said of costs in Prefect: while a batch runs, and in its report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.wire import RequestCounts
from flows.shown.progress import _Watch
from flows.shown.report import _cost
from flows.shown.run_history import RunHistory


@pytest.mark.parametrize(
    ("cost", "currency", "rows"),
    [
        (1_250_000_000, "usd", [("Cost", "1.25 USD")]),
        (None, None, []),
        (0, "eur", [("Cost", "0.00 EUR")]),
    ],
)
def test_the_report_has_a_cost_where_there_was_a_price(
    cost: int | None, currency: str | None, rows: list[tuple[str, str]]
) -> None:
    batch: Any = SimpleNamespace(cost=cost, currency=currency, status=BatchStatus.COMPLETED)
    assert _cost(batch) == rows


@pytest.mark.parametrize(
    ("cost", "words"), [(40_000_000, ["0.040000 EUR so far"]), (None, [])], ids=["price", "none"]
)
def test_the_progress_has_the_cost_so_far_where_there_is_a_price(
    cost: int | None, words: list[str]
) -> None:
    batch: Any = SimpleNamespace(
        id="batch_1",
        status=BatchStatus.IN_PROGRESS,
        cost=cost,
        currency="eur",
        counts=RequestCounts(10, 4, 0),
        eta_at=None,
    )
    chunks: Any = SimpleNamespace(completed=4, failed=0, pending=0, leased=1, done=0)
    services: Any = SimpleNamespace(settings=SimpleNamespace(page_of=lambda _: ""))
    watch = _Watch(services, "batch_1", RunHistory())
    *_, said = watch._description(batch, chunks).partition("chunk 0 of 1 done")
    assert said.removeprefix(" · ").split(" · ") == (words or [""])
