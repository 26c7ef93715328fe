"""The end of the ``batchyard up`` that the other tests here share; so named that it comes last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.services.up import Yard

pytestmark = pytest.mark.vllm


def test_ctrl_c_stops_everything(yard: Yard) -> None:
    """A warm engine, flow runs, workers, servers, in the end ``up`` itself."""
    assert yard.interrupt() == 0
    assert yard.is_over()
