"""Fields that have no effect in the engine are a warning of their batch, once for each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batchyard.cli.batches.summary import describe, summarise
from batchyard.engine.base import EngineAnswer
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import EngineLost
from batchyard.lifecycle import BatchStatus
from batchyard.steps.retry.retry import retry_batch
from batchyard.store.batch.effects import BatchEffects
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from batchyard.engine.base import EngineRequest
    from batchyard.lines.body_fields import Routes
    from batchyard.store import BatchRecord

KNOWN = frozenset({"model", "messages", "max_tokens", "n"})


class Described(StubEngine):
    """Says which fields it reads, and answers as often as it likes."""

    fields: frozenset[str] = KNOWN
    choices: int | None = None
    status = 200

    async def routes(self) -> Routes:
        return {CHAT: self.fields}

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        answer = await super().answer(request, timeout_seconds=timeout_seconds)
        if self.choices is None:
            return EngineAnswer(answer.tag, self.status, answer.body)
        body = json.loads(answer.body)
        body["choices"] = body["choices"][:1] * self.choices
        return EngineAnswer(answer.tag, answer.status, json.dumps(body).encode())


@pytest.fixture
def engine(yard: Yard) -> Described:
    made = Described()
    yard.use(made)
    return made


def warnings_of(batch: BatchRecord) -> list[tuple[str, str]]:
    return [(each.param, each.message) for each in batch.warnings]


LINES = [
    chat_line("a", guided_choice=["yes"], max_token=3),
    chat_line("b", guided_choice=["no"], service_tier=None),
    chat_line("c"),
]


@pytest.mark.usefixtures("engine")
async def test_a_field_that_the_engine_ignores_is_a_warning_with_its_lines(yard: Yard) -> None:
    batch = await yard.run(LINES)
    assert batch.status is BatchStatus.COMPLETED
    assert warnings_of(batch) == [
        ("body.guided_choice", "The engine ignores body.guided_choice, which is in 2 lines."),
        ("body.max_token", "The engine ignores body.max_token, which is in 1 line."),
    ]
    seen = msgspec.json.decode(msgspec.json.encode(batch.to_wire()))
    assert {each["code"] for each in seen["warnings"]} == {"field_ignored"}


@pytest.mark.usefixtures("engine")
async def test_commands_show_it_while_the_batch_runs_and_at_its_end(yard: Yard) -> None:
    batch = await yard.run(LINES)
    line = "  warning   The engine ignores body.max_token, which is in 1 line."
    for text in (await summarise(yard.services, batch), await describe(yard.services, batch)):
        assert text.count(line) == 1
    running = batch.model_copy(update={"status": BatchStatus.IN_PROGRESS, "completed_at": None})
    assert (await describe(yard.services, running)).count(line) == 1


@pytest.mark.parametrize("says_nothing", [True, False])
async def test_an_engine_that_does_not_say_what_it_reads_ignores_nothing(
    yard: Yard, engine: Described, monkeypatch: pytest.MonkeyPatch, says_nothing: bool
) -> None:
    async def routes() -> Any:
        if says_nothing:
            return {CHAT: None}
        raise EngineLost("it is too busy to say")

    monkeypatch.setattr(engine, "routes", routes)
    assert (await yard.run(LINES)).warnings == ()


@pytest.mark.usefixtures("engine")
async def test_fields_that_cannot_be_noted_cost_no_line(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def note(*_: object) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(BatchEffects, "note_ignored", note)
    batch = await yard.run(LINES)
    assert (batch.counts.completed, batch.warnings) == (3, ())
    assert "fields.not_noted" in caplog.text


async def test_a_server_that_gives_fewer_answers_than_asked_for_is_a_warning(
    yard: Yard, engine: Described
) -> None:
    engine.choices = 1
    lines = [chat_line(f"{n}", n=2) for n in range(3)]
    batch = await yard.run([*lines, chat_line("one")])
    (found,) = warnings_of(batch)
    assert found == (
        "body.n",
        "At least 3 lines got fewer answers than body.n asks for: the engine may ignore it.",
    )
    engine.choices = 2
    assert (await yard.run(lines)).warnings == ()


async def test_a_retry_has_warnings_of_its_own(yard: Yard, engine: Described) -> None:
    engine.status = 400
    first = await yard.run([chat_line("a", x=1)])
    assert [each.param for each in first.warnings] == ["body.x"]
    engine.fields = KNOWN | {"x"}
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert second.warnings == ()
