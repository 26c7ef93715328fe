"""The database's clock as an element of statements."""

from __future__ import annotations

import pytest
from sqlalchemy import ColumnElement, select

from batchyard.database.clock import clock, clock_seconds


@pytest.mark.parametrize("element", [clock(), clock_seconds()], ids=["clock", "clock_seconds"])
def test_a_statement_that_asks_for_the_time_is_compiled_once(element: ColumnElement[float]) -> None:
    assert select(element + 1)._generate_cache_key() is not None
