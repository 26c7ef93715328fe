"""Each inlet for users' URLs, and a listener that none of them may reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.web.inlets import INLETS, Canary, Inlet

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def canary() -> Iterator[Canary]:
    one = Canary()
    yield one
    one.socket.close()


@pytest.fixture(params=INLETS, ids=lambda inlet: inlet.name)
def inlet(request: pytest.FixtureRequest) -> Inlet:
    assert isinstance(request.param, Inlet)
    return request.param
