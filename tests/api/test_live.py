"""Live requests through the API, with OpenAI's own client: passed on, streamed and counted."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest

from batchyard.api.live import live_exchange
from batchyard.engine.base import LivePromise
from batchyard.engine.objective import Objective
from batchyard.errors import StoreUnavailable
from batchyard.locations.location import parse_location
from batchyard.metrics import metric_families as families
from batchyard.runner import hours_watch
from batchyard.runner.live import live_server
from batchyard.runner.run import Runner
from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow
from batchyard.services import patience
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.store import Quota
from tests.api import small_prefect
from tests.hurry import hurried
from tests.lifecycle import take_to_its_end
from tests.live import live_engine, witness
from tests.pages import block, replaced
from tests.patience import PATIENCE
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from batchyard.metrics.metric_families import Family
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.store import LiveEngine, UsageTotal
    from tests.api.conftest import Api
    from tests.api.small_prefect import SmallPrefect

MODEL = "stub-model"
SEATS = 8
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Live:
    """A runner with a live engine at work on the server's database."""

    runner: Runner
    services: Services
    folder: Path
    most: float = 0
    """Requests of batches that were in the engine at once, as far as was seen."""

    def figure(self, family: Family) -> float:
        """What the runner tells its exporter."""
        value = self.runner.figures().gauges[family.name]
        if family is families.INFLIGHT:
            self.most = max(self.most, value)
        return value

    def counted(self, family: Family) -> dict[str, float]:
        return self.runner.figures().counters[family.name]

    async def until(self, is_true: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + PATIENCE * seconds
        while not is_true():
            assert time.monotonic() < deadline, witness(self.folder)
            await asyncio.sleep(0.02)


async def used(services: Services, tenant: str = "one") -> list[UsageTotal]:
    """What the tenant used of each model."""
    now = int(await services.store.database.now())
    return await services.store.usage.totals(
        start=now - 7200,
        end=now + 1,
        width_seconds=86400,
        groups=("tenant", "model", "is_live"),
        tenants=[tenant],
    )


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "flush_seconds": 0.05,
            "quota": settings.quota.model_copy(update={"live_requests": 4}),
        }
    )


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPrefect]:
    """To be asked for ahead of ``api``, which looks for it as it starts."""
    with small_prefect.serving() as served:
        monkeypatch.setenv("PREFECT_API_URL", served.url)
        yield served


@asynccontextmanager
async def serving(
    services: Services,
    folder: Path,
    promise: LivePromise | None = None,
    adapters: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Live]:
    engine = live_engine(folder, MODEL, max_num_seqs=SEATS, promise=promise, adapters=adapters)

    async def engine_for(_: str) -> Any:
        return engine

    changed = services.settings.model_copy(update=settings)
    services = replace(services, engine_for=engine_for, settings=changed)
    with hurried():
        async with Runner(services, MODEL, flow_run_id="live") as runner:
            task = asyncio.create_task(runner.serve())
            try:
                yield Live(runner, services, folder)
            finally:
                runner.drain()
                await asyncio.wait_for(task, PATIENCE * 30)


@pytest.fixture
async def live(services: Services, tmp_path: Path) -> AsyncIterator[Live]:
    async with serving(services, tmp_path / "engine") as running:
        yield running


async def test_a_chat_is_answered_at_once(api: Api, live: Live) -> None:
    """The answer of the engine, with the tokens that it counted."""
    client = api.async_openai(max_retries=0)
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.alone
async def test_a_stream_comes_event_by_event(api: Api, live: Live) -> None:
    """The first word is there long before the last one."""
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 150 ms"}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=slow, max_tokens=8, stream=True
    )
    times, text = [], ""
    async for chunk in stream:
        times.append(time.monotonic())
        text += chunk.choices[0].delta.content or ""
    assert len(text.split()) > 2
    assert times[-1] - times[0] > 0.15 * (len(times) - 2)


async def test_completions_embeddings_and_responses_are_answered_too(api: Api, live: Live) -> None:
    client = api.async_openai(max_retries=0)
    assert (await client.completions.create(model=MODEL, prompt="a", max_tokens=2)).choices[0].text
    found = await client.embeddings.create(model=MODEL, input=["a", "b"])
    assert len(found.data) == 2
    assert (await client.responses.create(model=MODEL, input="a")).output_text
    stream = await client.responses.create(model=MODEL, input="a", stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"


async def test_anthropics_client_is_answered_and_counted_too(
    api: Api, services: Services, tmp_path: Path
) -> None:
    client = anthropic.AsyncAnthropic(
        base_url=api.url.removesuffix("/v1"), api_key=api.key, max_retries=0
    )
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    async with serving(services, tmp_path):
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            assert await stream.get_final_text()
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**asked | {"model": "other"})
    assert (message.type, message.usage.output_tokens) == ("message", 4)
    assert unknown.value.type == "not_found_error"
    (total,) = await used(services)
    assert (total.is_live, total.requests, total.output_tokens) == (True, 2, 8)


async def test_tokens_are_counted_by_the_engine_and_use_none(
    api: Api, services: Services, tmp_path: Path
) -> None:
    """Within the same rules as the request itself: the engine renders its prompt."""
    address = api.url.removesuffix("/v1")
    client = anthropic.AsyncAnthropic(base_url=address, api_key=api.key, max_retries=0)
    other = anthropic.AsyncAnthropic(base_url=address, api_key=api.other_key, max_retries=0)
    await services.store.tenants.set_quota("other", Quota(max_live_requests=0))
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "system": "Be brief."}
    source = {"type": "url", "url": "http://169.254.169.254/"}
    fetching = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    async with serving(services, tmp_path):
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.count_tokens(**asked | {"messages": fetching})
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.count_tokens(**asked | {"model": "other"})
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            await other.messages.count_tokens(**asked)
    assert refused.value.type == "invalid_request_error"
    assert denied.value.type == "permission_error"
    with pytest.raises(anthropic.APIStatusError):
        await client.messages.count_tokens(**asked)
    (total,) = await used(services)
    assert (total.is_live, total.requests, total.total_tokens) == (True, 1, 0)


async def test_a_client_that_did_not_ask_for_usage_gets_none_and_is_counted(
    api: Api, services: Services, tmp_path: Path
) -> None:
    client = api.async_openai(max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}
    wanted = {"include_usage": True}
    async with serving(services, tmp_path):
        plain = [chunk async for chunk in await client.chat.completions.create(**asked)]
        stream = await client.chat.completions.create(**asked, stream_options=wanted)
        full = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    assert full[-1].usage is not None
    (total,) = await used(services)
    assert (total.is_live, total.requests, total.output_tokens) == (True, 2, 8)


async def test_an_adapter_is_answered_by_the_engine_of_its_model(
    prefect: SmallPrefect, api: Api, services: Services, tmp_path: Path
) -> None:
    """And counted as the model's."""
    prefect.models, prefect.live, prefect.adapters = [MODEL], {MODEL}, {MODEL: ["law", "gone"]}
    client = api.async_openai(max_retries=0)
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
    async with serving(services, tmp_path, adapters=["law"]):
        answer = await client.chat.completions.create(model="law", **asked)
        with pytest.raises(openai.NotFoundError, match="gone` does not exist"):
            await client.chat.completions.create(model="gone", **asked)
        with pytest.raises(openai.NotFoundError, match="'none' does not exist"):
            await client.chat.completions.create(model="none", **asked)
    assert answer.model == "law"
    (total,) = await used(services)
    assert (total.model, total.requests, total.output_tokens) == (MODEL, 2, 4)


async def test_a_tenant_may_have_any_name(api: Api, services: Services, tmp_path: Path) -> None:
    made = await services.store.api_keys.create("Zoë / 東京\n", "x")
    client = api.async_openai(max_retries=0).with_options(api_key=made.secret)
    async with serving(services, tmp_path):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert [each.requests for each in await used(services, "Zoë / 東京\n")] == [1]


async def test_who_leaves_early_pays_for_what_was_made(
    api: Api, services: Services, tmp_path: Path
) -> None:
    """An estimate: the prompt by its bytes, the answer by its events."""
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 100 ms"}]
    async with serving(services, tmp_path) as live:
        stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await live.until(lambda: any("left" in line for line in witness(tmp_path)))
    (total,) = await used(services)
    assert total.requests == 1
    assert total.input_tokens > 10
    assert 1 <= total.output_tokens < 8


async def test_who_leaves_before_the_answer_begins_pays_for_the_prompt(
    api: Api, services: Services, tmp_path: Path
) -> None:
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 3000 ms"}]
    async with serving(services, tmp_path) as live:
        call = client.chat.completions.create(model=MODEL, messages=slow, stream=True)
        asking = asyncio.create_task(call)
        await live.until(lambda: len(witness(tmp_path)) == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await live.until(lambda: any("left after 0" in line for line in witness(tmp_path)))
    (total,) = await used(services)
    assert total.input_tokens > 10
    assert total.output_tokens == 0


async def test_a_wrong_key_an_unknown_model_and_a_bad_body_are_openai_errors(
    api: Api, live: Live
) -> None:
    with pytest.raises(openai.AuthenticationError):
        api.openai("sk-by-wrong").chat.completions.create(model=MODEL, messages=HELLO)
    client = api.openai(max_retries=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        await asyncio.to_thread(client.chat.completions.create, model="other", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as long:
        await asyncio.to_thread(client.chat.completions.create, model="x" * 9999, messages=HELLO)
    assert len(long.value.message) < 999
    refused = {"chat_template": "{{ x }}"}
    with pytest.raises(openai.BadRequestError) as bad:
        await asyncio.to_thread(
            client.chat.completions.create, model=MODEL, messages=HELLO, extra_body=refused
        )
    assert (bad.value.code, bad.value.param) == ("unsupported_parameter", "chat_template")


async def test_a_tenant_needs_a_limit_of_its_own_where_the_default_is_none(
    api: Api, live: Live, services: Services
) -> None:
    """With 0 nothing is read of the body, with 1 a second request is told to wait."""
    await services.store.tenants.set_quota("one", Quota(max_live_requests=0))
    client = api.async_openai(max_retries=0)
    with pytest.raises(openai.PermissionDeniedError):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    await services.store.tenants.set_quota("one", Quota(max_live_requests=1))
    slow = [{"role": "user", "content": "takes 300 ms"}]
    stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
    with pytest.raises(openai.RateLimitError) as busy:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert busy.value.response.headers["retry-after"] == "1"
    assert [chunk async for chunk in stream]
    assert await client.chat.completions.create(model=MODEL, messages=HELLO)


async def test_a_client_that_leaves_ends_its_request_in_the_engine(api: Api, live: Live) -> None:
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 200 ms"}]
    stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await live.until(lambda: any("left after" in line for line in witness(live.folder)))


async def test_an_engine_that_dies_ends_its_streams_with_an_error_and_comes_back(
    api: Api, live: Live
) -> None:
    client = api.async_openai(max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "stream": True}
    doomed = [{"role": "user", "content": "half takes 50 ms"}]
    with pytest.raises(openai.APIError) as lost:
        async for _ in await client.chat.completions.create(messages=doomed, **asked):
            pass
    assert lost.value.code == "engine_lost"
    answered = False
    deadline = time.monotonic() + PATIENCE * 20
    while not answered and time.monotonic() < deadline:
        with suppress(openai.InternalServerError):
            answered = bool(await client.chat.completions.create(model=MODEL, messages=HELLO))
        await asyncio.sleep(0.05)
    assert answered


async def test_anthropics_client_learns_of_an_engine_that_dies_in_its_words(
    api: Api, live: Live
) -> None:
    client = anthropic.AsyncAnthropic(base_url=api.url.removesuffix("/v1"), api_key=api.key)
    doomed = [{"role": "user", "content": "half takes 50 ms"}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": doomed}
    with pytest.raises(anthropic.APIStatusError, match="engine was lost") as lost:
        async for _ in await client.messages.create(stream=True, **asked):
            pass
    assert lost.value.type == "overloaded_error"


async def test_without_an_engine_a_model_is_not_known(api: Api) -> None:
    with pytest.raises(openai.NotFoundError):
        await api.async_openai(max_retries=0).chat.completions.create(model=MODEL, messages=HELLO)


async def test_nobody_without_the_secret_is_let_in(live: Live, services: Services) -> None:
    """Who finds the socket of a runner finds no engine behind it."""
    (engine,) = await services.store.live_engines.open(60)
    path = engine.address.removeprefix("unix://")
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
        body = json.dumps({"model": MODEL, "messages": HELLO})
        for key in (b"none", b"wrong", b"caf\xe9"):
            answer = await client.post(
                "http://x/v1/chat/completions",
                content=body,
                headers={"authorization": b"Bearer " + key},
            )
            assert answer.status_code == 401
    assert witness(live.folder) == []


async def test_a_batch_steps_back_while_live_requests_are_there(
    api: Api, services: Services, tmp_path: Path
) -> None:
    """Never all seats; half beside live requests, not none; every line has its answer."""
    lines = [chat_line(f"id-{number}", f"{number} takes 40 ms") for number in range(150)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = api.async_openai(max_retries=0)
    async with serving(services, tmp_path / "engine") as live:
        batch_id = await create_batch(
            live.services, BatchRequest(input=parse_location(str(source)), tenant="one")
        )
        task = asyncio.create_task(take_to_its_end(live.services, batch_id))
        await live.until(lambda: live.figure(families.INFLIGHT) > SEATS // 2)
        slow = [{"role": "user", "content": "takes 100 ms"}]
        stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
        beside = [live.figure(families.INFLIGHT) async for _ in stream]
        batch = await task
    assert batch.counts.completed == len(lines)
    assert max(beside[2:]) <= SEATS // 2
    assert any(beside[2:])
    assert live.most <= SEATS - SEATS // 4


@pytest.mark.parametrize(
    "objective",
    [
        Objective(first_token_seconds=1e-6, inter_token_seconds=60.0),
        Objective(first_token_seconds=60.0, inter_token_seconds=1e-6),
    ],
    ids=["for their first token", "between two tokens"],
)
async def test_users_who_wait_longer_than_promised_leave_less_to_batches(
    api: Api, services: Services, tmp_path: Path, objective: Objective
) -> None:
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 50 ms"}]
    async with serving(services, tmp_path / "engine", LivePromise(objective)) as live:
        assert live.runner._live is not None
        controller = live.runner._live._share.gate.controller
        before = controller.share(time.monotonic())
        stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
        assert [event async for event in stream]
        await live.until(lambda: controller.share(time.monotonic()) < before)


async def test_hours_of_batches_are_not_those_of_live_requests(
    api: Api, services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of them the engine stays, and batches wait for them."""
    monkeypatch.setattr(hours_watch, "_READ_SECONDS", 0.05)
    closed = Hours((HoursWindow("0 0 29 2 *", "1h"),))

    async def hours_of(_: str) -> Hours:
        return closed

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(chat_line("id", "question")) + "\n")
    await services.store.engine_hours.record({MODEL: closed})
    async with serving(replace(services, hours_of=hours_of), tmp_path / "engine") as live:
        batch_id = await create_batch(
            live.services, BatchRequest(input=parse_location(str(source)), tenant="one")
        )
        task = asyncio.create_task(take_to_its_end(live.services, batch_id))
        for _ in range(3):
            client = api.async_openai(max_retries=0)
            assert await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert not (await services.store.batches.get(batch_id)).counts.completed
        await services.store.engine_hours.record({MODEL: ALWAYS})
        assert (await task).counts.completed == 1


async def test_an_api_on_another_machine_reaches_the_engine_by_tcp(
    api: Api, services: Services, tmp_path: Path
) -> None:
    """At the first free port of those that the operator has opened."""
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        slots = {"live_host": "127.0.0.1", "live_port": first, "engine_slots": ["0", "1", "2"]}
        async with serving(services, tmp_path, **slots):
            (engine,) = await services.store.live_engines.open(60)
            ports = [f"http://127.0.0.1:{first + number}" for number in (1, 2)]
            assert engine.address in ports
            client = api.async_openai(max_retries=0)
            assert await client.chat.completions.create(model=MODEL, messages=HELLO)


async def test_an_engine_whose_port_is_taken_runs_batches(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(chat_line("id", "question")) + "\n")
    with socket.create_server(("", 0)) as taken:
        slots = {"live_host": "127.0.0.1", "live_port": taken.getsockname()[1]}
        async with serving(services, tmp_path / "engine", **slots) as live:
            batch_id = await create_batch(
                live.services, BatchRequest(input=parse_location(str(source)), tenant="one")
            )
            batch = await take_to_its_end(live.services, batch_id)
            assert batch.counts.completed == 1
            assert await services.store.live_engines.open(60) == []
    assert "No port of BATCHYARD_LIVE_PORT is free" in caplog.text


async def test_an_engine_that_is_ready_while_the_database_is_away_is_announced_later(
    api: Api, services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may have loaded for minutes."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    live_engines = services.store.live_engines
    register, tried = live_engines.register, 0

    async def away_at_first(engine: LiveEngine) -> None:
        nonlocal tried
        tried += 1
        if tried <= 3:
            raise StoreUnavailable("The database is away.")
        await register(engine)

    monkeypatch.setattr(live_engines, "register", away_at_first)
    async with serving(services, tmp_path / "engine"):
        client = api.async_openai(max_retries=0)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert answer.choices[0].message.content


async def test_metrics_tell_of_outcomes_tokens_and_first_events(
    api: Api, live: Live, tmp_path: Path
) -> None:
    client = api.async_openai(max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    await client.chat.completions.create(**asked)
    assert [each async for each in await client.chat.completions.create(**asked, stream=True)]
    await live.until(lambda: live.counted(families.LIVE_REQUESTS)["completed"] == 2)
    assert live.counted(families.LIVE_TOKENS)["completion"] == 8
    first = live.counted(families.LIVE_FIRST_SECONDS)
    assert sum(first[bound] for bound in first if bound != families.SUM) == 1


async def test_a_runner_that_drains_finishes_its_streams_and_takes_no_more(
    api: Api, live: Live
) -> None:
    client = api.async_openai(max_retries=0)
    slow = [{"role": "user", "content": "takes 100 ms"}]
    stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
    chunks = [await anext(aiter(stream))]
    live.runner.drain()
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason


async def test_a_body_may_be_as_large_as_a_line_and_no_larger(api: Api, live: Live) -> None:
    most = live.services.settings.limits.max_line_bytes
    with api.http() as client:
        answer = await asyncio.to_thread(
            client.post, "/chat/completions", content=b" " * (most + 1)
        )
    assert answer.status_code == 413
    text = "x" * 3_000_000
    done = await api.async_openai(max_retries=0).completions.create(model=MODEL, prompt=text)
    assert done.choices[0].text


@pytest.mark.parametrize(("name", "words"), [("sdk", 3), ("flex", 1)])
async def test_the_programs_of_the_page_print_an_answer(
    api: Api, services: Services, tmp_path: Path, name: str, words: int
) -> None:
    program = replaced(block("docs/how-to/serve-live.md", name), {"tiny-chat": MODEL})
    environment = os.environ | {"OPENAI_BASE_URL": api.url, "OPENAI_API_KEY": api.key}
    async with serving(services, tmp_path):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
    assert len(said.split()) >= words
    assert name == "sdk" or said.split() == [b"flex"]


async def test_a_client_that_does_not_read_gives_its_place_back(
    api: Api, live: Live, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_exchange, "_SEND_SECONDS", 0.3)
    await services.store.tenants.set_quota("one", Quota(max_live_requests=1))
    body = json.dumps({"model": MODEL, "input": ["a"] * 150_000}).encode()
    head = api.head("POST", "/embeddings", f"Content-Length: {len(body)}")
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1024)
    writer.write(head + body)
    await writer.drain()
    await live.until(lambda: len(witness(live.folder)) == 1)
    client = api.async_openai(max_retries=0)
    answered = False
    deadline = time.monotonic() + PATIENCE * 20
    while not answered and time.monotonic() < deadline:
        with suppress(openai.RateLimitError):
            answered = bool(await client.completions.create(model=MODEL, prompt="a"))
        await asyncio.sleep(0.05)
    assert answered
    writer.close()
    assert not reader.at_eof()


async def test_an_engine_that_dies_before_it_answers_is_not_tried_with_another(
    api: Api, live: Live
) -> None:
    """The request may be why: whoever sends it may send it again."""
    client = api.async_openai(max_retries=0)
    poison: Any = [{"role": "user", "content": "poison"}]
    with pytest.raises(openai.InternalServerError) as lost:
        await client.chat.completions.create(model=MODEL, messages=poison)
    assert (lost.value.status_code, lost.value.code) == (503, "engine_lost")


async def test_what_the_engine_refuses_is_an_openai_error(api: Api, live: Live) -> None:
    client = api.async_openai(max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(
            model=MODEL, input="a", encoding_format="float", dimensions="x"
        )  # type: ignore[arg-type]
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code is None


async def test_a_client_that_leaves_before_any_answer_ends_its_request_too(
    api: Api, live: Live
) -> None:
    """Nothing is written to it that could fail."""
    client = api.async_openai(max_retries=0)
    slow: Any = [{"role": "user", "content": "takes 60000 ms"}]
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=slow))
    await live.until(lambda: live.figure(families.LIVE_INFLIGHT) == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await live.until(lambda: live.counted(families.LIVE_REQUESTS)["left"] == 1)
    assert live.figure(families.LIVE_INFLIGHT) == 0


async def test_a_flex_request_waits_for_a_seat_to_spare_and_says_its_tier(
    api: Api, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.runner._live is not None
    share = live.runner._live._share
    client = api.async_openai(max_retries=0)
    share.in_flight += SEATS
    asked = asyncio.create_task(
        client.chat.completions.create(model=MODEL, messages=HELLO, service_tier="flex")
    )
    done, _ = await asyncio.wait([asked], timeout=1)
    assert not done
    share.in_flight -= SEATS
    answer = await asked
    assert answer.service_tier == "flex"
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, service_tier="flex", stream=True
    )
    assert {event.service_tier async for event in stream} == {"flex"}
    monkeypatch.setattr(live_server, "_FLEX_SECONDS", 0.3)
    share.in_flight += SEATS
    with pytest.raises(openai.RateLimitError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO, service_tier="flex")
    share.in_flight -= SEATS
    assert (refused.value.code, refused.value.type) == ("resource_unavailable", "requests")
    assert refused.value.response.headers["retry-after"] == "5"
    assert share.flex == 0
