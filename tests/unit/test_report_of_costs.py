"""The line about costs in the report of a batch in Prefect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.report import _cost


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
    batch: Any = SimpleNamespace(cost=cost, currency=currency)
    assert _cost(batch) == rows
