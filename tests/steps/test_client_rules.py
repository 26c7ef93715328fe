"""Whose bodies are held to the rules for clients: everybody's but those of ``batchyard run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import InputRefused
from batchyard.lifecycle import BatchStatus
from batchyard.settings_parts import BodySettings
from batchyard.steps.retry.retry import retry_batch
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


async def test_a_batch_is_held_to_the_rules_unless_it_is_the_operators_own(yard: Yard) -> None:
    lines = [chat_line("a"), chat_line("b", chat_template="{{ x }}")]
    with pytest.raises(InputRefused) as caught:
        await yard.prepared(lines)
    [entry] = caught.value.entries
    assert (entry.code, entry.param, entry.line) == (
        "unsupported_parameter",
        "body.chat_template",
        2,
    )
    assert (await yard.run(lines, any_body=True)).status is BatchStatus.COMPLETED


async def test_the_operator_may_change_the_rules(yard: Yard) -> None:
    lines = [chat_line("a", chat_template="{{ x }}", n=9)]
    yard.set(bodies=BodySettings(allowed_fields=["chat_template"], max_choices=9))
    assert (await yard.run(lines)).status is BatchStatus.COMPLETED


async def test_a_retry_is_held_to_the_rules_of_its_batch(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=400, times=1)]))
    first = await yard.run([chat_line("a", chat_template="{{ x }}")], any_body=True)
    assert first.error_file_id is not None
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert (second.status, second.counts.completed) == (BatchStatus.COMPLETED, 1)
