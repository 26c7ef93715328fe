"""Answers that are not what was asked for: what is sent again while a batch runs, what counts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.engine.base import EngineAnswer
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.engine.stub.stub_answers import answer_to
from batchyard.errors import RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.metrics.metric_families import RETRIES
from batchyard.results.output_rules import OnInvalidOutput
from batchyard.results.results import unprocessed
from batchyard.runner.chunk.output_retries import OutputRetries
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from batchyard.steps.retry.retry import RetryCaller, accept_retry
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.results.results import ResultLine
    from batchyard.store import BatchRecord

LONGER: dict[str, Any] = {"finish_reasons": ["length"], "set": {"max_tokens": 16}}
JSON: dict[str, Any] = {"invalid_json": True, "set": {"temperature": 0.5}}
SOON_SECONDS = 20.0


def chat(text: str) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def saying(text: str, **fault: Any) -> Fault:
    return Fault(FaultKind.ANSWER, status=200, body=chat(text), **fault)


def is_longer(body: bytes) -> bool:
    return json.loads(body)["max_tokens"] == 16


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


async def answers(yard: Yard, batch: BatchRecord) -> dict[str, Any]:
    lines = await yard.results(batch.output_file_id)
    return {line["custom_id"]: line["response"]["body"] for line in lines}


async def errors(yard: Yard, batch: BatchRecord) -> dict[str, str]:
    lines = await yard.results(batch.error_file_id)
    return {line["custom_id"]: line["error"]["message"] for line in lines if line["error"]}


async def test_an_answer_that_is_cut_off_is_sent_again_with_the_patch(yard: Yard) -> None:
    lines = [chat_line("cut", "Ä question", seed=1.0), chat_line("whole", max_tokens=16)]
    batch = await yard.run(lines, on_invalid_output={**LONGER, "unset": ["seed"]})
    found = await answers(yard, batch)
    reasons = {name: each["choices"][0]["finish_reason"] for name, each in found.items()}
    assert reasons == {"cut": "stop", "whole": "stop"}
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 2)
    sent = [request.body for request in yard.engine.log if b"question" in request.body]
    wanted = {**lines[0]["body"], "max_tokens": 16}
    del wanted["seed"]
    assert [json.loads(body) for body in sent] == [lines[0]["body"], wanted]
    # What is not patched is not read and written again.
    assert json.dumps(lines[0]["body"]["messages"]).encode() in sent[1]
    used = [
        json.loads(answer_to("stub-model", CHAT, request.body)[1])["usage"]
        for request in yard.engine.log
    ]
    assert len(used) == 3
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in used) == 36
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in used)


async def test_without_the_option_nothing_is_sent_again(yard: Yard) -> None:
    batch = await yard.run([chat_line("cut")])
    assert (yard.engine.executed, batch.counts.completed) == (1, 1)


@pytest.mark.parametrize("attempts", [1, 3])
async def test_the_last_answer_is_the_lines_however_bad_it_is(yard: Yard, attempts: int) -> None:
    """So it is without ``then``."""
    rule = {**LONGER, "set": {"max_tokens": 5}, "attempts": attempts}
    batch = await yard.run([chat_line("a"), chat_line("b")], on_invalid_output=rule)
    assert yard.engine.executed == 2 * (1 + attempts)
    assert {
        each["usage"]["completion_tokens"] for each in (await answers(yard, batch)).values()
    } == {5}
    assert batch.usage.output_tokens == 2 * (4 + 5 * attempts)


async def test_or_the_line_fails_with_the_reason_and_none_of_its_words(yard: Yard) -> None:
    rule = {**LONGER, "set": {"max_tokens": 5}, "then": "error_file"}
    batch = await yard.run(
        [chat_line("a", "hunter2"), chat_line("b", max_tokens=16)], on_invalid_output=rule
    )
    assert (batch.counts.completed, batch.counts.failed) == (1, 1)
    [line] = await yard.results(batch.error_file_id)
    assert (line["custom_id"], line["response"]) == ("a", None)
    assert line["error"] == {
        "code": "invalid_output",
        "message": "No answer to this request passed the tests of on_invalid_output. The last one "
        "ended with the finish_reason length.",
    }
    # They were made, and paid for.
    assert batch.usage.output_tokens == 4 + 5 + 16


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"required": ["x"]}}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("secret words", "The last one is not JSON."),
        ('{"secret": 1}', "The last one does not fit the JSON schema of its request."),
    ],
)
async def test_what_is_not_the_json_that_was_asked_for_is_sent_again(
    yard: Yard, text: str, fault: str
) -> None:
    yard.use(
        StubEngine(
            faults=[
                saying('{"x": 1}', matches=lambda body: b'"good' in body),
                saying(text, matches=lambda body: b'"slow' in body, times=1),
                saying('{"x": 2}', matches=lambda body: b'"slow' in body),
                saying(text),
            ]
        )
    )
    lines = [chat_line(name, name, response_format=SCHEMA) for name in ("good", "slow", "bad")]
    batch = await yard.run(lines, on_invalid_output={**JSON, "then": "error_file"})
    found = await answers(yard, batch)
    said = {name: each["choices"][0]["message"]["content"] for name, each in found.items()}
    assert said == {"good": '{"x": 1}', "slow": '{"x": 2}'}
    failed = await errors(yard, batch)
    assert failed.keys() == {"bad"}
    assert failed["bad"].endswith(fault)
    assert yard.engine.executed == 1 + 2 + 2
    assert batch.usage.total_tokens == 7 * 5


@pytest.mark.parametrize("then", ["keep", "error_file"])
async def test_a_refused_attempt_costs_no_answer_that_is_kept(yard: Yard, then: str) -> None:
    """Its own words are the error of a batch that keeps no bad answer."""
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_longer, status=400)]))
    batch = await yard.run([chat_line("a")], on_invalid_output={**LONGER, "then": then})
    if then == "keep":
        assert (await answers(yard, batch))["a"]["usage"]["completion_tokens"] == 4
    else:
        [line] = await yard.results(batch.error_file_id)
        assert line["response"]["status_code"] == 400
    assert batch.usage.output_tokens == 4


async def test_a_patch_that_does_not_fit_a_body_changes_nothing(yard: Yard) -> None:
    rule = {**LONGER, "set": {"max_tokens": 16, "stop.first": "x"}, "then": "error_file"}
    batch = await yard.run([chat_line("a", stop="x"), chat_line("b")], on_invalid_output=rule)
    assert (await errors(yard, batch)).keys() == {"a"}
    assert (await answers(yard, batch)).keys() == {"b"}
    assert yard.engine.executed == 1 + 2


async def test_copies_have_the_answer_of_the_last_attempt(yard: Yard) -> None:
    lines = [chat_line(f"id-{n}", "same", temperature=0) for n in range(5)]
    batch = await yard.run(lines, on_invalid_output=LONGER, deduplicate=True)
    found = await answers(yard, batch)
    assert len(found) == 5
    assert {each["usage"]["completion_tokens"] for each in found.values()} == {16}
    assert (yard.engine.executed, batch.deduplicated_requests) == (2, 4)
    assert batch.usage.output_tokens == 4 + 16


async def test_what_is_no_text_is_not_judged(yard: Yard) -> None:
    line = {**chat_line("a"), "url": "/v1/embeddings"}
    line["body"] = {"model": "stub-model", "input": "x"}
    batch = await yard.run([line], on_invalid_output={**JSON, "then": "error_file"})
    assert (yard.engine.executed, batch.counts.completed) == (1, 1)


async def test_a_passing_failure_of_a_later_attempt_is_no_attempt(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_longer, status=503, times=3)]))
    batch = await yard.run([chat_line("a")], on_invalid_output=LONGER)
    assert (await answers(yard, batch))["a"]["usage"]["completion_tokens"] == 16
    assert yard.engine.executed == 5


async def test_an_engine_that_dies_under_a_later_attempt_gets_that_one_again(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.DEATH, is_longer, times=1)]))
    batch = await yard.run([chat_line("a")], on_invalid_output=LONGER)
    assert (await answers(yard, batch))["a"]["usage"]["completion_tokens"] == 16
    assert [is_longer(request.body) for request in yard.engine.log] == [False, True, True]


async def test_a_runner_that_is_lost_between_attempts_leaves_one_answer(yard: Yard) -> None:
    """The next one begins with the first attempt."""
    yard.use(StubEngine(latency=lambda body: 3600.0 if is_longer(body) else 0.0))
    batch_id = await yard.prepared([chat_line("a"), chat_line("b")], on_invalid_output=LONGER)
    running = asyncio.create_task(run_chunks(yard.services, "stub-model", batch_id=batch_id))
    await until(lambda: yard.engine.running == 2)
    running.cancel()
    await asyncio.wait([running])
    yard.use(StubEngine())
    batch = await yard.finish(batch_id)
    assert (await answers(yard, batch)).keys() == {"a", "b"}
    assert [is_longer(request.body) for request in yard.engine.log].count(False) == 2
    assert batch.counts.completed == 2


@pytest.mark.parametrize(("then", "completed"), [("keep", 2), ("error_file", 0)])
async def test_a_batch_that_is_cancelled_delivers_the_answers_that_it_keeps(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, then: str, completed: int
) -> None:
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.02)
    yard.use(StubEngine(latency=lambda body: 3600.0 if is_longer(body) else 0.0))
    lines = [chat_line(name, "same", temperature=0) for name in ("a", "copy")]
    rule = {**LONGER, "then": then}
    batch_id = await yard.create(lines, on_invalid_output=rule, deduplicate=True)
    running = asyncio.create_task(yard.finish(batch_id))
    await until(lambda: yard.engine.running == 1)
    await yard.services.store.batches.cancel(batch_id)
    batch = await asyncio.wait_for(running, SOON_SECONDS)
    assert (batch.status, batch.counts.completed) == (BatchStatus.CANCELLED, completed)
    assert len(await answers(yard, batch)) == completed
    assert len(await errors(yard, batch)) == 2 - completed


async def test_a_batch_that_is_paused_sends_nothing_again(yard: Yard) -> None:
    """The line has no result then, and its runner nothing to wait for."""
    engine = StubEngine(max_num_seqs=2, latency=0.05)
    results: list[int] = []
    await engine.start()
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as window:
        request = WindowRequest(
            *(1, "id-1", CHAT, json.dumps(chat_line("")["body"]).encode()),
            lambda ordinal, _: results.append(ordinal),
            owner="me",
        )
        request.again = lambda _: True
        await window.submit(request)
        await until(lambda: engine.running == 1)
        await asyncio.wait_for(window.withdraw("me", abort=False), SOON_SECONDS)
    assert (results, engine.executed, window.withdrawn) == ([], 1, 1)


async def test_the_first_answers_are_what_is_learned_of_lengths(yard: Yard) -> None:
    """A batch without the option gets no longer ones."""
    lines = [chat_line(f"id-{n}", f"question {n}") for n in range(16)]
    await yard.run(lines, on_invalid_output=LONGER)
    assert yard.engine.executed == 32
    known = (await yard.services.store.lengths.of("default", "stub-model")).known
    assert {each.mean for each in known.values()} == {4}


async def test_a_request_that_is_sent_again_goes_before_those_that_came_later() -> None:
    """Its prompt is still in the engine's cache."""
    engine = StubEngine(max_num_seqs=3, latency=0.001)
    results: list[int] = []
    await engine.start()
    window = Window(
        engine, timeout_seconds=60, hang_seconds=60, may_send=lambda: not window.in_flight
    )
    async with window:
        for ordinal in range(5):
            request = WindowRequest(
                *(ordinal, f"id-{ordinal}", CHAT),
                json.dumps({**chat_line("")["body"], "n": ordinal}).encode(),
                lambda ordinal, _: results.append(ordinal),
                owner="me",
            )
            attempts = iter([True] * (ordinal == 0))
            request.again = lambda _, attempts=attempts: next(attempts, False)  # type: ignore[misc]
            await window.submit(request)
        await until(lambda: len(results) == 5)
        assert window.counts.counters()[RETRIES.name]["invalid_output"] == 1
    assert [json.loads(request.body)["n"] for request in engine.log] == [0, 0, 1, 2, 3, 4]


def test_a_request_without_a_further_answer_has_the_one_that_the_batch_keeps() -> None:
    taken: list[ResultLine] = []
    body = json.dumps(chat_line("a")["body"]).encode()
    request = WindowRequest(7, "a", CHAT, body, lambda _, line: taken.append(line), owner="me")
    rule = OnInvalidOutput.of({**LONGER, "set": {"max_tokens": 1000, "n": 2}}, None)
    retries = OutputRetries(rule, "batch_a")
    retries.follow(request)
    assert request.again is not None
    answer = EngineAnswer(1, 200, answer_to("stub-model", CHAT, body)[1])
    assert request.again(answer)
    assert not request.again(answer)
    request.deliver(7, unprocessed("a", "It failed."))
    [line] = taken
    assert json.loads(line.line)["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "needs a test"),
        ({"set": {"max_tokens": 1}}, "needs a test"),
        ({**LONGER, "sett": {}}, "has no key 'sett'; it has finish_reasons, invalid_json"),
        ({**LONGER, "attempts": 4}, "`int` <= 3 - at `$.attempts`"),
        ({**LONGER, "then": "fail"}, "at `$.then`"),
        ({**LONGER, "set": {"model": "other"}}, "cannot change model"),
        ({**LONGER, "unset": ["stream"]}, "cannot change stream"),
        ({**LONGER, "set": {"a": 1, "a.b": 2}}, "a.b leads through a value that is not an object"),
        ({**LONGER, "set": {"user": "x" * 20_000}}, "may have 16384 bytes at most"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        OnInvalidOutput.of(rule, None)
    assert message in str(refused.value)
    assert (refused.value.param, refused.value.refusal_code) == (
        "on_invalid_output",
        "invalid_value",
    )


MEDIA = [{"role": "user", "content": [{"type": "image_url", "image_url": "http://10.0.0.1/"}]}]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chat_template": "{{ x }}"}, "unsupported_parameter"),
        ({"messages": MEDIA}, "media_url_refused"),
        ({"tools": [{"server_url": "http://10.0.0.1/"}]}, "unsupported_parameter"),
        ({"n": 1000}, "integer_above_max_value"),
    ],
)
async def test_a_patch_cannot_set_what_a_body_may_not_have(
    yard: Yard, change: dict[str, Any], code: str
) -> None:
    rule = {**LONGER, "set": change}
    with pytest.raises(RequestRefused) as refused:
        await yard.create([chat_line("a")], on_invalid_output=rule)
    assert (refused.value.param, refused.value.refusal_code) == ("on_invalid_output", code)
    own = await yard.run([chat_line("a")], on_invalid_output=rule, any_body=True, tenant="one")
    with pytest.raises(RequestRefused):
        await accept_retry(yard.services, own.id, caller=RetryCaller(tenant="one"))


@pytest.mark.parametrize("any_body", [False, True])
async def test_a_rule_that_is_nested_too_deeply_is_refused(yard: Yard, any_body: bool) -> None:
    """Deeper ones were written into the batch's row, which could not be read then."""
    value: Any = 1
    for _ in range(950):
        value = [value]
    rule = {**LONGER, "set": {"a": value}}
    with pytest.raises(RequestRefused) as refused:
        await yard.create([chat_line("a")], on_invalid_output=rule, any_body=any_body)
    assert refused.value.param == "on_invalid_output"
