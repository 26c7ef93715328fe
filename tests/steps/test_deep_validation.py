"""Deep validation of whole batches: with a real model's tokenizer, and where it cannot be had."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.prompt_counting import counter as counter_module
from batchyard.engine.prompt_counting.counter import (
    Count,
    CountedRequest,
    CounterProgram,
    PromptCounter,
    counter_program,
)
from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.errors import InputRefused, RequestRefused, SettingsError
from batchyard.lifecycle import BatchStatus
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.wire import RequestCounts
from tests.contract.engine.conftest import ENGINE_PYTHON, TINY_CHAT, require_vllm
from tests.lifecycle import prepare_batch
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Iterator


CONTEXT = 64
LONG = "zqxj" * CONTEXT
EMBEDDINGS = "/v1/embeddings"
FAKE = """
import json, os, signal, time
def answers(requests):
    setup = json.loads(next(requests))
    yield True, json.dumps({"max_model_len": 64}).encode()
    open(setup["model"], "a").write(f"{os.getpid()} ")
    for request in requests:
        if b"hang" in request:
            time.sleep(600)
        if b"crash" in request:
            os.kill(os.getpid(), signal.SIGKILL)
        yield True, json.dumps([[1, 1, True, []] for each in json.loads(request)]).encode()
"""
"""Counts 1 for every line, and hangs or dies on some.

It writes its process ids to a file.
"""
SILENT = """
import json, os, time
def answers(requests):
    open(json.loads(next(requests))["model"], "a").write(f"{os.getpid()} ")
    time.sleep(600)
    yield
"""
"""Loads its tokenizer forever."""


def program(*options: str, weights: Path = TINY_CHAT) -> CounterProgram:
    require_vllm()
    return counter_program(ENGINE_PYTHON, str(weights), EngineOptions(options), {})


@pytest.fixture(scope="module")
def counter() -> Iterator[PromptCounter]:
    """One process for all tests that only count."""
    with PromptCounter(program(), lambda: None) as opened:
        assert opened.why_not == ""
        yield opened


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CounterProgram:
    """A counter without a tokenizer, in this environment."""
    script = tmp_path / "script.py"
    script.write_text(FAKE)
    monkeypatch.setattr(counter_module, "SCRIPT", script)
    setup = {"model": str(tmp_path / "pids")}
    return CounterProgram(Path(sys.executable), dict(os.environ), setup)


def pids(program: CounterProgram) -> list[int]:
    path = Path(program.setup["model"])
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def count(counter: PromptCounter, url: str, body: dict[str, Any]) -> Count:
    counter.send([CountedRequest(url, body)])
    (found,) = counter.receive()
    return found


async def refused(yard: Yard, lines: list[Any], **request: Any) -> list[tuple[int | None, str]]:
    """The errors of a batch that fails, each with its line and code."""
    with pytest.raises(InputRefused) as caught:
        await yard.prepared(lines, validation="deep", **request)
    return [(each.line, each.code) for each in caught.value.entries]


# -- whole batches --------------------------------------------------------------------------


async def test_a_prompt_that_is_too_long_fails_the_batch_with_its_line(yard: Yard) -> None:
    yard.engine.prompt_counter = program("--max-model-len", str(CONTEXT))
    lines = [chat_line("a"), chat_line("b", LONG), chat_line("c", max_tokens=CONTEXT + 1)]
    batch = await yard.run(lines, validation="deep")
    assert batch.status is BatchStatus.FAILED
    first, second = batch.errors or ()
    assert (first.line, first.code, first.param) == (2, "context_length_exceeded", "body.messages")
    assert first.message.startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, your prompt has at "
    )
    assert (second.line, second.param) == (3, "body.max_tokens")


async def test_bad_lines_may_be_left_out_and_the_others_run(
    yard: Yard, fake: CounterProgram
) -> None:
    yard.engine.prompt_counter = fake
    long = chat_line("b", max_tokens=CONTEXT + 1)
    lines = [chat_line("a"), long, {**chat_line("c"), "method": "GET"}]
    batch = await yard.run([*lines, chat_line("d")], validation="deep", on_invalid="error_file")
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(4, 2, 2))
    errors = await yard.results(batch.error_file_id)
    codes = [(each["custom_id"], each["error"]["code"]) for each in errors]
    assert codes == [("b", "context_length_exceeded"), ("c", "invalid_method")]
    answers = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "d"]


async def test_prompts_are_counted_for_the_model_of_the_good_lines(
    yard: Yard, fake: CounterProgram
) -> None:
    """What a bad line before them names is another model, with another context."""
    small, ours = StubEngine("small"), yard.engine
    small.prompt_counter = fake

    async def engine_for(model: str) -> StubEngine:
        return small if model == "small" else ours

    yard.services = replace(yard.services, engine_for=engine_for)
    bad = {**chat_line("bad"), "body": {"model": "small"}}
    lines = [bad, chat_line("a", max_tokens=CONTEXT + 1)]
    batch = await yard.run(lines, validation="deep", on_invalid="error_file")
    assert (batch.model, batch.counts) == ("stub-model", RequestCounts(2, 1, 1))


async def test_a_batch_whose_lines_are_all_too_long_is_completed_without_them(
    yard: Yard, fake: CounterProgram
) -> None:
    yard.engine.prompt_counter = fake
    lines = [chat_line(name, max_tokens=CONTEXT + 1) for name in "ab"]
    batch = await yard.run(lines, validation="deep", on_invalid="error_file")
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(2, 0, 2))
    assert batch.model is None


async def test_a_basic_batch_counts_nothing_unless_the_operator_wants_it(
    yard: Yard, fake: CounterProgram
) -> None:
    yard.engine.prompt_counter = fake
    lines = [chat_line("a", max_tokens=CONTEXT + 1)]
    await yard.prepared(lines)
    assert pids(fake) == []
    yard.set(validation="deep")
    with pytest.raises(InputRefused):
        await yard.prepared(lines)
    with pytest.raises(InputRefused):
        await yard.prepared(lines, validation="basic")


async def test_another_word_for_the_validation_is_refused(yard: Yard) -> None:
    with pytest.raises(RequestRefused, match="validation must be one of basic, deep"):
        await yard.create([chat_line("a")], validation="shallow")


async def test_errors_of_both_kinds_are_in_the_order_of_their_lines(
    yard: Yard, fake: CounterProgram
) -> None:
    yard.engine.prompt_counter = fake
    lines = [
        chat_line("a", max_tokens=CONTEXT + 1),
        {**chat_line("b"), "method": "GET"},
        chat_line("c", max_tokens=CONTEXT + 1),
    ]
    limits = yard.services.settings.limits
    assert [line for line, _ in await refused(yard, lines)] == [1, 2, 3]
    # The line with the wrong method is found first, and the cap is full.
    to_limits = type(limits).to_limits
    capped = {"to_limits": lambda self, **of: replace(to_limits(self, **of), max_reported_errors=1)}
    yard.set(limits=type("Capped", (type(limits),), capped)())
    assert await refused(yard, lines) == [
        (1, "context_length_exceeded"),
        (None, "more_errors"),
    ]


async def test_without_an_engine_environment_the_rest_is_checked_and_the_log_says_why(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    async def engine_for(_: str) -> Any:
        raise SettingsError("No engine environment at /nowhere.")

    yard.services = replace(yard.services, engine_for=engine_for)
    await yard.prepared([chat_line("a", LONG)], validation="deep")
    said = "1 line not counted: No engine environment at /nowhere"
    assert said in caplog.text
    assert "1 line not checked by the engine's own rules" in caplog.text
    bad = {**chat_line("b"), "method": "GET"}
    assert await refused(yard, [bad]) == [(1, "invalid_method")]


async def test_a_server_of_its_own_has_no_counter(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    await yard.prepared([chat_line("a", LONG)], validation="deep")
    assert "its engine is a server that runs already" in caplog.text


async def test_what_the_engine_refuses_or_ignores_is_a_bad_line(yard: Yard) -> None:
    """What vLLM says of each request, the test on a real one compares."""
    yard.engine.prompt_counter = program()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
    lines = [
        chat_line("a", guided_choice=["yes", "no"], max_token=5, service_tier=None),
        chat_line("b", response_format={"type": "json_object", "schema": {}}),
        chat_line("c", response_format={"type": "object"}),
        chat_line("d", tools=[tool]),
        chat_line("e", tools=[tool], tool_choice="none"),
        chat_line("f", structured_outputs={"json": {"type": "objekt"}}),
    ]
    with pytest.raises(InputRefused) as caught:
        await yard.prepared(lines, validation="deep")
    assert [(each.line, each.code, each.param) for each in caught.value.entries] == [
        (1, "unknown_parameter", "body.guided_choice"),
        (1, "unknown_parameter", "body.max_token"),
        (2, "unknown_parameter", "body.response_format.schema"),
        (3, "invalid_request", "body.response_format.type"),
        (4, "invalid_request", "body.tools"),
        (6, "invalid_json_schema", "body.structured_outputs"),
    ]


def test_tools_need_a_parser_of_their_calls(counter: PromptCounter) -> None:
    hi = [{"role": "user", "content": "hi"}]
    body = {"messages": hi, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (refusal,) = count(counter, CHAT, body).refusals or ()
    assert "--enable-auto-tool-choice and --tool-call-parser" in refusal.message
    # vLLM reads one of the two options only beside the other.
    assert not program("--tool-call-parser", "hermes").setup["has_tool_parser"]
    both = program("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with PromptCounter(both, lambda: None) as with_parser:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            assert count(with_parser, CHAT, {**body, "tool_choice": choice}).refusals == ()


# -- the counter ----------------------------------------------------------------------------


def test_it_counts_every_kind_of_prompt(counter: PromptCounter) -> None:
    hi = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = count(counter, CHAT, {"messages": hi})
    assert chat.tokens is not None
    assert chat.tokens > 3
    assert chat.is_exact
    assert count(counter, CHAT, {"messages": parts}) == chat
    assert count(counter, "/v1/responses", {"input": "hi"}) == chat
    message = {"model": "m", "messages": hi, "max_tokens": 1}
    assert count(counter, "/v1/messages", message) == chat
    several = count(counter, "/v1/completions", {"prompt": ["zqxj", [5, 5, 5]]})
    assert (several.tokens, several.longest) == (7, 4)
    assert count(counter, EMBEDDINGS, {"input": [5, 6]}).tokens == 2


def test_of_media_and_tools_it_counts_what_is_certain(counter: PromptCounter) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with_image = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]
    plain = count(counter, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    found = count(counter, CHAT, {"messages": with_image})
    assert (found.tokens, found.is_exact) == (plain.tokens, False)
    assert count(counter, CHAT, {"messages": "hi"}).tokens is None
    own = {"messages": with_image, "chat_template": "{{ messages }}"}
    assert count(counter, CHAT, own).tokens is None


def test_a_text_of_ten_megabytes_costs_a_moment(counter: PromptCounter) -> None:
    began = time.monotonic()
    found = count(counter, "/v1/completions", {"prompt": "a" * 10_000_000})
    assert found.longest is not None
    assert found.longest > 8192
    assert time.monotonic() - began < 20


def test_the_context_is_that_of_the_options_or_of_the_models_files(counter: PromptCounter) -> None:
    assert counter.max_model_len == 8192
    assert program("--max-model-len", "auto").setup["is_context_doubtful"]
    assert program("--max-model-len", "4k").setup["max_model_len"] == 4000
    assert program("--hf-overrides", "{}").setup["is_context_doubtful"]


def test_what_cannot_be_loaded_is_said() -> None:
    # An environment without transformers.
    here = replace(program(), python=Path(sys.executable))
    with PromptCounter(here, lambda: None) as counter:
        assert "No module named 'transformers'" in counter.why_not
        assert count(counter, CHAT, {"messages": []}) == Count()
    nothing = CounterProgram(Path("/nowhere/python"), {}, {})
    with PromptCounter(nothing, lambda: None) as counter:
        assert "/nowhere/python could not load the tokenizer" in counter.why_not


def test_a_request_that_ends_the_process_costs_its_own_count_only(fake: CounterProgram) -> None:
    with PromptCounter(fake, lambda: None) as counter:
        counter.send([CountedRequest(CHAT, {"n": n}) for n in ("a", "crash", "b")])
        assert [each.tokens for each in counter.receive()] == [1, None, 1]
        assert count(counter, CHAT, {}).tokens == 1
        assert counter.why_not == ""


def test_after_a_few_deaths_nothing_is_counted_any_more(fake: CounterProgram) -> None:
    with PromptCounter(fake, lambda: None) as counter:
        for _ in range(6):
            assert count(counter, CHAT, {"n": "crash"}) == Count()
        assert counter.why_not == "too many requests ended the process that counts them"
        assert count(counter, CHAT, {}) == Count()
    assert len(pids(fake)) == 4


def test_one_that_hangs_is_ended(fake: CounterProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_module, "_ANSWER_SECONDS", 0.5)
    with PromptCounter(fake, lambda: None) as counter:
        counter.send([CountedRequest(CHAT, {"n": n}) for n in ("a", "hang")])
        assert [each.tokens for each in counter.receive()] == [1, None]


def test_requests_that_take_long_are_counted_for_a_while_only(
    fake: CounterProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counter_module, "_QUICK_SECONDS", 0.0)
    monkeypatch.setattr(counter_module, "_SLOW_SECONDS", 0.0)
    with PromptCounter(fake, lambda: None) as counter:
        assert count(counter, CHAT, {}).tokens == 1
        assert counter.why_not == "its requests take too long to count"
        assert count(counter, CHAT, {}) == Count()


async def test_a_cancelled_validation_leaves_no_process(yard: Yard, fake: CounterProgram) -> None:
    yard.engine.prompt_counter = fake
    batch_id = await yard.create([chat_line("a", "hang")], validation="deep")
    await fetch_input(yard.services, batch_id)
    running = asyncio.create_task(prepare_batch(yard.services, batch_id))
    while not pids(fake):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert_gone(fake)


def test_an_interruption_ends_the_start_of_a_counter(fake: CounterProgram) -> None:
    counter_module.SCRIPT.write_text(SILENT)

    def interrupted() -> None:
        if pids(fake):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        PromptCounter(fake, interrupted).__enter__()
    assert_gone(fake)


def assert_gone(program: CounterProgram) -> None:
    assert pids(program)
    for pid in pids(program):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
