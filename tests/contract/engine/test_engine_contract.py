"""What every engine must do, whoever runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import anthropic
import pytest

from batchyard.api.messages.message_results import translated
from batchyard.engine.base import Abort, EngineRequest, NoAnswer
from batchyard.results.results import answered
from tests.contract.engine.conftest import CHAT, MODEL, Subject, chat_body, request, slow_body
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from batchyard.engine.base import EngineAnswer

pytestmark = pytest.mark.asyncio(loop_scope="session")

TIMEOUT_SECONDS = 60.0


async def each(requests: Sequence[EngineRequest]) -> AsyncIterator[EngineRequest]:
    for one in requests:
        yield one


async def ask(subject: Subject, *requests: EngineRequest) -> dict[int, EngineAnswer]:
    return await collect(subject, each(requests))


async def collect(
    subject: Subject,
    requests: AsyncIterator[EngineRequest | Abort] | AsyncIterator[EngineRequest],
    on_answer: Callable[[int], None] = lambda _: None,
) -> dict[int, EngineAnswer]:
    """The answers by tag; fails if a tag is answered twice."""
    answers: dict[int, EngineAnswer] = {}
    async for answer in subject.engine.stream(requests, timeout_seconds=TIMEOUT_SECONDS):
        assert answer.tag not in answers
        answers[answer.tag] = answer
        on_answer(answer.tag)
    return answers


async def test_every_request_is_answered_exactly_once(subject: Subject) -> None:
    """A stream ends when each of its tags has its one answer."""
    requests = [request(tag, chat_body(f"number {tag}")) for tag in range(300)]

    answers = await ask(subject, *requests)

    assert set(answers) == set(range(300))
    assert {answer.status for answer in answers.values()} == {200}


async def test_answers_carry_their_own_tag(subject: Subject) -> None:
    """The answer under a tag is the answer to that tag's request."""
    bodies = {tag: chat_body("same text", max_tokens=tag) for tag in (1, 2, 3, 5, 8, 13)}

    answers = await ask(subject, *(request(tag, body) for tag, body in bodies.items()))

    tokens = {
        tag: json.loads(answer.body)["usage"]["completion_tokens"]
        for tag, answer in answers.items()
    }
    assert tokens == {tag: tag for tag in bodies}


async def test_an_empty_stream_ends_at_once(subject: Subject) -> None:
    """No requests, no answers."""
    assert await ask(subject) == {}


async def test_a_client_error_passes_through_and_the_others_go_on(subject: Subject) -> None:
    """A body that is not JSON gets the engine's own 4xx; its neighbours are answered."""
    answers = await ask(
        subject, request(1, chat_body("hi")), request(2, b'{"model": '), request(3, chat_body("ho"))
    )

    assert answers[1].status == answers[3].status == 200
    assert answers[2].status == 400
    assert answers[2].no_answer is None
    assert "message" in json.loads(answers[2].body)["error"]


async def test_a_message_and_its_refusal_become_results_of_anthropics_shape(
    subject: Subject,
) -> None:
    """What a line of ``/v1/messages`` is answered, as the SDK reads it from a Message Batch."""
    asked = {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief. " * 40}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    }
    bodies = [json.dumps({"model": model, **asked}).encode() for model in (MODEL, "other")]
    requests = [request(tag, body, url="/v1/messages") for tag, body in enumerate(bodies)]

    answers = await ask(subject, *requests)

    good, bad = (answered(f"id-{n}", "req_1", answers[n].status, answers[n].body) for n in (0, 1))
    assert good.usage.input_tokens > 40
    assert 1 <= good.usage.output_tokens <= 4
    read = [
        anthropic.types.messages.MessageBatchIndividualResponse.model_validate_json(
            translated(line)
        )
        for line in (good.line, bad.line)
    ]
    assert isinstance(read[0].result, anthropic.types.messages.MessageBatchSucceededResult)
    assert read[0].result.message.content[0].type == "text"
    assert read[0].result.message.usage.output_tokens == good.usage.output_tokens
    assert isinstance(read[1].result, anthropic.types.messages.MessageBatchErroredResult)
    assert read[1].result.error.error.type == "not_found_error"
    assert "other" in read[1].result.error.error.message


async def test_an_unknown_route_is_answered_404(subject: Subject) -> None:
    """The engine's routes decide, not ours."""
    answers = await ask(subject, request(1, chat_body("hi"), url="/v1/no/such/route"))

    assert answers[1].status == 404


async def test_a_request_has_the_content_type_that_it_is_given(subject: Subject) -> None:
    """A form is no JSON, whatever is in it: no engine takes one for the other."""
    form = EngineRequest(1, CHAT, chat_body("hi"), "request-1", "multipart/form-data;boundary=b")

    answers = await ask(subject, form, request(2, chat_body("hi")))

    assert answers[1].status in {400, 415, 422}
    assert answers[2].status == 200


async def test_another_model_is_answered_404(subject: Subject) -> None:
    """A body that names a model which the engine does not serve is refused by it."""
    answers = await ask(subject, request(1, chat_body("hi", model="another")))

    assert answers[1].status == 404
    assert "another" in json.loads(answers[1].body)["error"]["message"]


async def test_a_body_with_newlines_and_any_unicode_arrives_whole(subject: Subject) -> None:
    """Bodies are counted, not split at line ends."""
    text = "\r\n\n\u2028 é 漢字 \U0001f600 \x00\n"
    pretty = json.dumps(json.loads(chat_body(text)), indent=2).encode() + b"\n\n"

    answers = await ask(subject, request(1, pretty), request(2, chat_body(text * 100)))

    assert answers[1].status == answers[2].status == 200


async def test_a_request_that_outlasts_its_time_is_answered_timeout(subject: Subject) -> None:
    """Only that request: the quick one on the same stream is answered well."""
    requests = [request(1, slow_body()), request(2, chat_body("quick"))]
    stream = subject.engine.stream(each(requests), timeout_seconds=1.5)

    answers = {answer.tag: answer async for answer in stream}

    assert answers[2].status == 200
    assert answers[1].status is None
    assert answers[1].no_answer is NoAnswer.TIMEOUT
    assert await subject.runs(0, within_seconds=5)


async def test_closing_the_stream_aborts_what_is_in_flight(subject: Subject) -> None:
    """After the caller turns away the engine works on nothing, within five seconds."""
    requests = [request(0, chat_body("quick")), *(request(n, slow_body(n)) for n in range(1, 21))]
    stream = subject.engine.stream(each(requests), timeout_seconds=TIMEOUT_SECONDS)
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        first = await anext(aiter(stream))
        assert await subject.runs(20)

    assert first.tag == 0
    assert await subject.runs(0, within_seconds=5)


async def test_cancelling_the_reader_aborts_what_is_in_flight(subject: Subject) -> None:
    """A cancelled task leaves nothing running in the engine."""
    task = asyncio.create_task(ask(subject, *(request(n, slow_body(n)) for n in range(10))))
    assert await subject.runs(10)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await subject.runs(0, within_seconds=5)


async def test_an_abort_ends_one_request_and_leaves_the_others(subject: Subject) -> None:
    """It is answered ABORTED and runs no longer; its neighbours run on and are answered."""

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        for tag in range(4):
            yield request(tag, slow_body(tag))
        assert await subject.runs(4)
        yield Abort(2)
        assert await subject.runs(3, within_seconds=5)
        yield request(4, chat_body("quick"))
        for tag in (0, 1, 3):
            yield Abort(tag)

    answers = await collect(subject, requests())

    aborted = {tag for tag, answer in answers.items() if answer.no_answer is NoAnswer.ABORTED}
    assert aborted == {0, 1, 2, 3}
    assert {answers[tag].status for tag in aborted} == {None}
    assert answers[4].status == 200
    assert await subject.runs(0, within_seconds=5)


async def test_an_abort_of_what_is_not_in_flight_is_ignored(subject: Subject) -> None:
    """A tag that was never there, one that has its answer, one that comes later."""
    answered: asyncio.Queue[int] = asyncio.Queue()

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        yield Abort(99)
        yield Abort(2)
        yield request(1, chat_body("first"))
        assert await answered.get() == 1
        yield Abort(1)
        yield request(2, chat_body("second"))
        assert await answered.get() == 2
        yield Abort(2)

    answers = await collect(subject, requests(), answered.put_nowait)

    assert {tag: answer.status for tag, answer in answers.items()} == {1: 200, 2: 200}


async def test_an_abort_that_crosses_the_answer_makes_no_second_one(subject: Subject) -> None:
    """Exactly one answer, whoever is first; what is not aborted is answered well."""

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        for tag in range(120):
            yield request(tag, chat_body(f"number {tag}", max_tokens=1 + tag % 3))
            if tag % 2:
                # Some in the same piece of bytes, some while it runs, some too late.
                await asyncio.sleep(tag % 5 * 0.003)
                yield Abort(tag)
            if tag % 4 == 3:
                yield Abort(tag)

    answers = await collect(subject, requests())

    assert set(answers) == set(range(120))
    assert {answers[tag].status for tag in range(0, 120, 2)} == {200}
    for tag in range(1, 120, 2):
        assert (answers[tag].status, answers[tag].no_answer) in {
            (200, None),
            (None, NoAnswer.ABORTED),
        }
    assert await subject.runs(0, within_seconds=5)


async def test_the_caller_bounds_the_window(subject: Subject) -> None:
    """With a window of 200 all 200 are taken, and the 201st waits until one is answered."""
    window = asyncio.Semaphore(200)
    yielded = 0

    async def requests() -> AsyncIterator[EngineRequest]:
        nonlocal yielded
        for tag in range(600):
            await window.acquire()
            yielded += 1
            yield request(tag, chat_body(f"number {tag}", max_tokens=2))

    answered: set[int] = set()
    async for answer in subject.engine.stream(requests(), timeout_seconds=TIMEOUT_SECONDS):
        assert answer.status == 200
        assert yielded - len(answered) <= 200
        answered.add(answer.tag)
        window.release()

    assert answered == set(range(600))


async def test_answers_come_while_requests_are_still_being_sent(subject: Subject) -> None:
    """A request may depend on the answer before it: both directions flow at once."""
    answered: asyncio.Queue[int] = asyncio.Queue()

    async def requests() -> AsyncIterator[EngineRequest]:
        for tag in range(5):
            yield request(tag, chat_body("one at a time"))
            assert await answered.get() == tag

    stream = subject.engine.stream(requests(), timeout_seconds=TIMEOUT_SECONDS)
    async for answer in stream:
        answered.put_nowait(answer.tag)


async def test_an_error_of_the_caller_reaches_the_caller(subject: Subject) -> None:
    """What the request source raises is raised by the stream, and what ran is aborted."""

    async def requests() -> AsyncIterator[EngineRequest]:
        yield request(1, slow_body())
        assert await subject.runs(1)
        raise LookupError("the plan is gone")

    with pytest.raises(LookupError, match="the plan is gone"):
        async for _ in subject.engine.stream(requests(), timeout_seconds=TIMEOUT_SECONDS):
            pass

    assert await subject.runs(0, within_seconds=5)


async def test_two_streams_run_side_by_side(subject: Subject) -> None:
    """Tags need be unique on one stream only."""
    first, second = await asyncio.gather(
        ask(subject, *(request(n, chat_body("a", max_tokens=2)) for n in range(50))),
        ask(subject, *(request(n, chat_body("b", max_tokens=3)) for n in range(50))),
    )

    tokens = {json.loads(answer.body)["usage"]["completion_tokens"] for answer in first.values()}
    assert (len(first), len(second), tokens) == (50, 50, {2})


async def test_the_engine_lists_its_routes(subject: Subject) -> None:
    """What the engine serves is known before anything is sent."""
    routes = await subject.engine.routes()

    assert routes is not None
    assert {CHAT, "/v1/completions", "/v1/responses"} <= routes.keys()


async def test_the_work_done_grows_while_a_request_runs(subject: Subject) -> None:
    """Long before it is answered."""
    stream = subject.engine.stream(each([request(1, slow_body())]), timeout_seconds=TIMEOUT_SECONDS)
    reader = asyncio.create_task(anext(aiter(stream)))
    assert await subject.runs(1)
    before = await subject.engine.work_done()
    assert before is not None

    async with asyncio.timeout(PATIENCE * 10):
        while (await subject.engine.work_done() or 0) <= before:
            pass

    assert not reader.done()
    reader.cancel()
    await asyncio.wait([reader])
    assert await subject.runs(0, within_seconds=5)


async def test_the_work_done_stands_still_while_nothing_runs(subject: Subject) -> None:
    """To ask is no work."""
    await ask(subject, request(1, chat_body("hi")))
    assert await subject.runs(0, within_seconds=5)

    numbers = {await subject.engine.work_done() for _ in range(5)}

    assert len(numbers) == 1
