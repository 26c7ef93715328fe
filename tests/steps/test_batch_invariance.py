"""A batch says whether all of its engines gave answers that do not depend on other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from batchyard.engine.stub.stub import StubEngine
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


async def test_a_batch_of_such_an_engine_says_so(yard: Yard) -> None:
    engine = StubEngine()
    engine.is_batch_invariant = True
    yard.use(engine)
    batch = await yard.run([chat_line("one")])
    assert batch.to_wire().batch_invariant is True


async def test_a_batch_of_any_other_engine_says_nothing(yard: Yard) -> None:
    yard.use(StubEngine())
    batch = await yard.run([chat_line("one")])
    assert batch.to_wire().batch_invariant is msgspec.UNSET
