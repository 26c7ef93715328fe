"""A machine on which runners of a model failed is left alone for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import EngineStartFailed
from batchyard.runner.machine_pause import (
    MachinePaused,
    check_machine,
    pause_seconds,
    record_failure,
)

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

MODEL = "stub-model"


def test_pauses_double_up_to_five_minutes() -> None:
    assert [pause_seconds(count) for count in range(7)] == [0, 15, 30, 60, 120, 240, 300]


async def test_a_machine_without_failures_is_used(yard: Yard) -> None:
    await check_machine(yard.services, MODEL)


async def test_after_a_failure_the_machine_is_paused_with_the_reason(yard: Yard) -> None:
    yard.set(machine="gpu-c")
    message = await record_failure(yard.services, MODEL, "run-1", EngineStartFailed("no GPU"))
    assert message == "On gpu-c: no GPU"
    with pytest.raises(MachinePaused, match=r"On gpu-c: .* another 1[45] s.* once: no GPU"):
        await check_machine(yard.services, MODEL)


async def test_a_machine_is_tried_again_when_its_pause_is_over(yard: Yard) -> None:
    async def age(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE runners SET heartbeat_at = heartbeat_at - 16")

    yard.set(machine="gpu-c")
    await record_failure(yard.services, MODEL, "run-1", EngineStartFailed("no GPU"))
    await yard.services.store.database.write(age)
    await check_machine(yard.services, MODEL)


async def test_the_pause_is_for_that_model_and_machine(yard: Yard) -> None:
    yard.set(machine="gpu-c")
    await record_failure(yard.services, MODEL, "run-1", EngineStartFailed("no GPU"))
    await check_machine(yard.services, "another-model")
    yard.set(machine="gpu-b")
    await check_machine(yard.services, MODEL)


async def test_an_error_of_the_system_is_recorded_too(yard: Yard) -> None:
    yard.set(machine="gpu-c")
    message = await record_failure(yard.services, MODEL, "run-1", MemoryError())
    assert message == "On gpu-c: MemoryError"
