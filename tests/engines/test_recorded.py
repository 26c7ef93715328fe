"""Servers that run already are recognised, and their answers are read, as they were recorded."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from batchyard.engine.base import EngineAnswer, EngineRequest
from batchyard.engine.kinds import recognition, unknown
from batchyard.engine.kinds.kind import MOST_SEATS, Pages, Usage
from batchyard.engine.kinds.recognition import KINDS, recognise, seats_of
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.errors import EngineLost, EngineNotReached
from batchyard.lines.body_fields import ignored_fields
from batchyard.results.results import answered
from batchyard.runner.window.refusals import is_refusal
from tests.engines.playback import NAMES, Recording, body_of, played
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


ROOT = Path(__file__).resolve().parents[2]
KIND_OF = {
    "infinity": "Infinity",
    "llama-cpp-python": "llama-cpp-python",
    "llama-server": "llama-server",
    "sglang": "SGLang",
    "text-embeddings-inference": "Text Embeddings Inference",
    "transformers-serve": "transformers serve",
}
SEATS = {
    "infinity": 32,
    "llama-cpp-python": 1,
    "llama-server": 2,
    "sglang": 96,
    "text-embeddings-inference": 4,
    "transformers-serve": 1,
}


@pytest_asyncio.fixture(params=NAMES)
async def recording(request: pytest.FixtureRequest) -> AsyncIterator[Recording]:
    async with played(Recording.named(request.param)) as found:
        yield found


@pytest_asyncio.fixture
async def engine(recording: Recording) -> AsyncIterator[RemoteEngine]:
    started = RemoteEngine(recording.url, recording.model, exclusive=True)
    await started.start()
    yield started
    await started.stop()


async def ask(engine: RemoteEngine, recording: Recording, *titles: str) -> list[EngineAnswer]:
    async def requests() -> AsyncIterator[EngineRequest]:
        for tag, title in enumerate(titles):
            body = json.dumps({"question": title}).encode()
            yield EngineRequest(tag, recording.url_of(title), body, f"req_{tag:032x}")

    found = [answer async for answer in engine.stream(requests(), timeout_seconds=30)]
    return sorted(found, key=lambda answer: answer.tag)


# -- what it is -----------------------------------------------------------------------------


async def test_a_server_is_recognised_and_says_how_many_requests_it_runs(
    engine: RemoteEngine, recording: Recording
) -> None:
    name = recording.content["server"]
    assert (engine.kind.name, engine.max_num_seqs) == (KIND_OF[name], SEATS[name])


@pytest.mark.parametrize("name", NAMES)
async def test_a_number_that_no_server_says_begins_small_and_is_found(name: str) -> None:
    """Where others may use the server. The others' seats are what is divided."""
    async with played(Recording.named(name)) as recording:
        engine = RemoteEngine(recording.url, recording.model)
        await engine.start()
        await engine.stop()
    assert engine.gate is not None
    first = {"infinity": 8, "llama-cpp-python": 1, "transformers-serve": 1}.get(name)
    search = engine.gate.controller.search
    assert (None if search is None else search.number) == first
    if first is not None:
        assert (engine.max_num_seqs, engine.window_size) == (first, first)


async def test_a_server_is_asked_what_it_is_only_once(
    engine: RemoteEngine, recording: Recording
) -> None:
    recording.asked.clear()
    await engine.start()
    assert len(recording.asked) <= 2


async def test_a_server_is_recognised_without_a_request_to_an_endpoint(
    engine: RemoteEngine, recording: Recording
) -> None:
    """But where it has no list of models: then an empty request finds its endpoints."""
    asked_for_models = {"/v1/models", "/models"} & recording.content["looks"].keys()
    posts = [path for path in recording.asked if path == recording.url_of("x")]
    assert engine.kind is not unknown.KIND
    assert not (asked_for_models and posts)


def test_the_version_that_was_recorded_is_the_one_that_the_page_names() -> None:
    known = {kind.name: kind.known for kind in KINDS}
    for name in NAMES:
        content = Recording.named(name).content
        said = known[KIND_OF[name]]
        assert said is not None
        assert (content["version"], content["from"] == "a run") == (said.version, said.is_run)


async def test_a_server_that_nobody_knows_is_asked_for_a_few_pages() -> None:
    content = {"model": "m", "sort": "chat", "answers": {}, "looks": {}}
    content["looks"] = {"/v1/models": {"status": 200, "json": {"data": [{"id": "m"}]}}}
    async with played(Recording(content)) as recording:
        engine = RemoteEngine(recording.url, "m")
        await engine.start()
        await engine.stop()
    assert engine.kind is unknown.KIND
    assert engine.max_num_seqs == 8
    assert sorted(recording.asked) == [
        "/info",
        "/openapi.json",
        "/props",
        "/server_info",
        "/v1/models",
    ]


async def test_a_server_whose_pages_never_come_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_SECONDS", 0.1)

    async def never(_: str) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(PATIENCE * 5):
        assert await recognise(never) is unknown.KIND


async def test_a_server_that_goes_away_meanwhile_is_unknown() -> None:
    async def lost(_: str) -> tuple[int, bytes]:
        raise EngineLost("gone")

    assert await recognise(lost) is unknown.KIND


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "page",
    [
        *(b"", b"{", b"null", b"[]", b"7", b'"text"', b'{"data": 7}', b'{"data": [7]}'),
        b'{"internal_states": [7], "max_running_requests": "many", "dp_size": []}',
        json.dumps({"total_slots": MOST_SEATS + 1, "max_batch_requests": -1}).encode(),
        b'{"internal_states": [{"effective_max_running_requests_per_dp": true}]}',
    ],
)
async def test_what_a_kind_is_told_may_be_anything(kind: object, page: bytes) -> None:
    paths = ("/v1/models", "/openapi.json", "/info", "/props", "/server_info")
    pages = Pages(dict.fromkeys(paths, page))
    found = next(each for each in KINDS if each is kind)
    found.is_it(pages)
    assert found.seats(pages) in {None, 1}


async def test_seats_of_a_server_that_was_not_told_its_limit_are_those_that_it_was_given() -> None:
    async def info(_: str) -> tuple[int, bytes]:
        return 200, b'{"max_running_requests": 64, "dp_size": 2}'

    kind = next(kind for kind in KINDS if kind.name == "SGLang")
    assert await seats_of(kind, info) == 128


# -- what it answers ------------------------------------------------------------------------


async def test_every_request_gets_the_answer_that_the_server_gave(
    engine: RemoteEngine, recording: Recording
) -> None:
    answers = await ask(engine, recording, *recording.answers)
    expected = [(page["status"], body_of(page)) for page in recording.answers.values()]
    assert [(answer.status, answer.body) for answer in answers] == expected


async def test_the_usage_of_an_answer_is_the_one_that_it_names(
    engine: RemoteEngine, recording: Recording
) -> None:
    title = next(iter(recording.answers))
    (answer,) = await ask(engine, recording, title)
    assert answer.status == 200
    usage = answered("id", "req", answer.status, answer.body).usage
    said = recording.answers[title]["json"]["usage"]
    assert usage.input_tokens == said["prompt_tokens"]
    assert usage.output_tokens == said.get("completion_tokens", 0)


def test_usage_is_what_the_kind_says_that_it_is() -> None:
    text = Recording.named("infinity").answers["embedding"]["json"]["usage"]
    assert text["prompt_tokens"] == len("Hello you there")
    two = Recording.named("llama-server").answers["two choices"]["json"]
    assert (len(two["choices"]), two["usage"]["completion_tokens"]) == (2, 4)
    said = {kind.name: kind.usage for kind in KINDS}
    assert said["Infinity"] is Usage.CHARACTERS
    assert said["llama-server"] is Usage.ONE_CHOICE


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_is_too_long_is_refused_in_the_words_of_the_kind(name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == KIND_OF[name])
    page = Recording.named(name).answers["too long"]
    says = [each.is_in(page["status"], body_of(page)) for each in kind.too_long]
    assert any(says) == (page["status"] != 200)


@pytest.mark.parametrize("name", NAMES)
async def test_a_busy_server_costs_no_line(name: str) -> None:
    async with played(Recording.named(name)) as recording:
        if "busy" not in recording.answers:
            return
        engine = RemoteEngine(recording.url, recording.model, exclusive=True)
        await engine.start()
        (answer,) = await ask(engine, recording, "busy")
        await engine.stop()
        assert is_refusal(answer)
        assert answer.status is not None
        assert any(each.is_in(answer.status, answer.body) for each in engine.kind.busy)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_status_of_a_busy_server_is_a_refusal(kind: object) -> None:
    busy = next(each for each in KINDS if each is kind).busy
    assert all(is_refusal(EngineAnswer(1, each.status)) for each in busy)


async def test_a_server_that_lost_its_model_is_no_fault_of_a_line() -> None:
    """It says so with 400, as for a bad line."""
    async with played(Recording.named("transformers-serve")) as recording:
        engine = RemoteEngine(recording.url, "another")
        engine._was_listed = True
        await engine.start()
        with pytest.raises(EngineNotReached, match="does not serve model 'another'"):
            await ask(engine, recording, "another model")
        await engine.stop()


# -- what it ignores ------------------------------------------------------------------------


async def test_fields_that_a_server_takes_and_ignores_are_known(
    engine: RemoteEngine, recording: Recording
) -> None:
    """Beside those that its own description does not name."""
    routes = await engine.routes()
    for url, fields in engine.kind.ignored.items():
        assert routes is not None
        given = {url: dict.fromkeys([*fields, "model"], 1)}
        assert ignored_fields(given, routes).keys() == fields
    assert routes is None or "/v1/embeddings" in routes or recording.content["sort"] == "chat"


@pytest.mark.parametrize(
    ("name", "question", "field"),
    [
        ("llama-cpp-python", "two choices", "n"),
        ("transformers-serve", "two choices", "n"),
        ("transformers-serve", "logprobs", "logprobs"),
        ("transformers-serve", "response_format", "response_format"),
    ],
)
def test_what_is_ignored_was_seen_to_be(name: str, question: str, field: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == KIND_OF[name])
    answer = Recording.named(name).answers[question]
    (choice,) = answer["json"]["choices"]
    assert choice.get("logprobs") is None
    assert field in kind.ignored["/v1/chat/completions"]


async def test_a_limit_that_its_description_does_not_name_is_ignored() -> None:
    async with played(Recording.named("llama-cpp-python")) as recording:
        engine = RemoteEngine(recording.url, recording.model)
        await engine.start()
        routes = await engine.routes()
        await engine.stop()
    assert routes is not None
    chat = {"/v1/chat/completions": {"max_completion_tokens": 3, "max_tokens": 1}}
    assert ignored_fields(chat, routes) == {"max_completion_tokens": 3}


# -- how full it is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "running", "waiting", "cache"),
    [("sglang", 3.0, 1.0, 0.25), ("llama-server", 0.0, 0.0, None)],
)
async def test_gauges_tell_how_full_a_server_is(
    name: str, running: float, waiting: float, cache: float | None
) -> None:
    async with played(Recording.named(name)) as recording:
        engine = RemoteEngine(recording.url, recording.model)
        await engine.start()
        occupancy = await engine.occupancy()
        await engine.stop()
    assert occupancy is not None
    seen = (occupancy.running, occupancy.waiting, occupancy.cache_used)
    assert seen == (running, waiting, cache)


def test_latencies_are_read_where_a_kind_counts_them() -> None:
    kind = next(kind for kind in KINDS if kind.name == "SGLang")
    page = Recording.named("sglang").content["looks"]["/metrics"]["text"]
    assert kind.gauges is not None
    load = kind.gauges.load(page)
    assert load is not None
    assert (load.first_token.total, load.inter_token.within(0.05)) == (4.0, 7.0)


# -- one folder -----------------------------------------------------------------------------


def test_no_other_module_names_a_kind() -> None:
    """What is special about a server stands in one folder. vLLM is also an engine of ours."""
    words = re.compile(
        r"(?i)sglang|llama[_. -]?(cpp|server)|infinity_emb|Infinity,|text.embeddings|\bTEI\b"
        r"|transformers serve"
    )
    own = ROOT / "batchyard" / "engine" / "kinds"
    packages = ("batchyard", "blocks", "tasks", "flows", "commands")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if not path.is_relative_to(own) and words.search(path.read_text())
    ]
    assert found == []
