"""What only real vLLM can show: its process tree, its log, its own way to fail."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from batchyard.engine.vllm import vllm
from batchyard.errors import EngineLost, EngineStartFailed
from batchyard.metrics.exporter.page import make_page
from batchyard.metrics.published import FOLDER_VARIABLE, Figures, publishing
from batchyard.results.results import Outcome
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from tests.contract.engine.conftest import (
    ADAPTER,
    CHAT,
    MODEL,
    ROOT,
    Subject,
    chat_body,
    request,
    require_vllm,
    slow_body,
    vllm_engine,
    vllm_running,
)
from tests.contract.engine.engine_owner import ASKED
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.engine.base import EngineAnswer, EngineRequest, Occupancy
    from batchyard.engine.vllm.vllm import VllmEngine
    from batchyard.results.results import ResultLine

# The owner's engine loads while the first tests run.
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("serving_owner")]
in_session_loop = pytest.mark.asyncio(loop_scope="session")


async def ask(engine: VllmEngine, *requests: EngineRequest) -> dict[int, EngineAnswer]:
    async def each() -> AsyncIterator[EngineRequest]:
        for one in requests:
            yield one

    stream = engine.stream(each(), timeout_seconds=60)
    return {answer.tag: answer async for answer in stream}


def processes_of(session: int) -> dict[int, str]:
    """Process id → command of everything alive in a session: no part of vLLM leaves it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            before, after = (folder / "stat").read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        state, _, _, its_session, *_ = after.split()
        if int(its_session) == session and state != "Z":
            found[int(folder.name)] = before.split("(", 1)[1]
    return found


def session_of(engine: VllmEngine) -> int:
    assert engine._running is not None
    return engine._running.process.session


def core_of(engine: VllmEngine) -> int:
    processes = processes_of(session_of(engine))
    return next(pid for pid, name in processes.items() if name == "VLLM::EngineCor")


def gone_within(session: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes_of(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Owner:
    """``engine_owner.py`` in a process of its own."""

    def __init__(self, tmp_path: Path) -> None:
        script = Path(__file__).with_name("engine_owner.py")
        self.process = subprocess.Popen(
            [sys.executable, script, tmp_path / "engine.log"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

        self.session = int(self.read_until("session ")[-1].split()[1])

    def read_until(self, word: str, count: int = 1) -> list[str]:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            count -= word in line
            if count <= 0:
                return lines
        raise AssertionError(f"the owner ended: {lines}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def serving_owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    require_vllm()
    owner = Owner(tmp_path_factory.mktemp("owner"))
    yield owner
    owner.kill()


@dataclass(frozen=True)
class Embedded:
    """What the owner's engine has said: status and body by tag, see ``ASKED`` there."""

    routes: list[str]
    answers: dict[int, tuple[int, Any]]


@pytest.fixture(scope="module")
def embedded(serving_owner: Owner) -> Embedded:
    lines = serving_owner.read_until("answer ", count=len(ASKED))
    words = [line.split(" ", 3) for line in lines if line.startswith("answer ")]
    (routes,) = (line.split()[1:] for line in lines if line.startswith("routes "))
    return Embedded(
        routes, {int(tag): (int(status), json.loads(body)) for _, tag, status, body in words}
    )


@in_session_loop
async def test_only_we_can_reach_the_engine(session_vllm: VllmEngine) -> None:
    """The socket has mode 0600 in a folder of mode 0700, the log has 0600."""
    running = session_vllm._running
    assert running is not None
    modes = [running.socket_path, running.folder, running.log_path]

    assert [stat.S_IMODE(path.stat().st_mode) for path in modes] == [0o600, 0o700, 0o600]


@in_session_loop
async def test_its_metrics_are_on_the_exporters_page_with_our_labels(
    session_vllm: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: nothing that vLLM exports is taken for a bad line."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    figures = Figures(socket=str(session_vllm.metrics_socket))
    async with publishing({"model": "m", "engine": "0"}, lambda: figures):
        pass
    async with publishing({"model": "m", "engine": "0"}, lambda: figures):
        page = await make_page(tmp_path, ["0"], {})
    found = {one.name: one for each in parsed(page) for one in each.samples}
    assert found["batchyard_engine_scrape_ok"].value == 1
    assert found["batchyard_engine_scrape_refused_lines"].value == 0
    running = found["vllm:num_requests_running"]
    ours = {"batchyard_model": "m", "batchyard_engine": "0"}
    assert running.labels == ours | {"engine": "0", "model_name": "tiny-chat"}
    theirs = {one.name for each in parsed(await session_vllm.metrics()) for one in each.samples}
    assert theirs <= found.keys()


@in_session_loop
async def test_an_adapter_answers_by_its_own_name_beside_its_model(
    session_vllm: VllmEngine,
) -> None:
    """All in one stream, as a batch has them; what vLLM does not have is not found."""
    names = [MODEL, ADAPTER, MODEL, ADAPTER, "none"]
    bodies = [chat_body("Who are you?", model=name, temperature=0) for name in names]
    answers = await ask(session_vllm, *(request(n, body) for n, body in enumerate(bodies)))
    assert [answers[n].status for n in range(5)] == [200, 200, 200, 200, 404]
    read = [json.loads(answers[n].body) for n in range(4)]
    assert [each["model"] for each in read] == names[:4]
    said = [each["choices"][0]["message"]["content"] for each in read]
    assert said[0] == said[2] != said[1] == said[3]


@in_session_loop
async def test_it_says_how_full_it_is_while_a_request_runs(session_vllm: VllmEngine) -> None:
    async def occupancy() -> Occupancy:
        said = await session_vllm.occupancy()
        assert said is not None
        return said

    running = asyncio.create_task(ask(session_vllm, request(1, slow_body())))
    async with asyncio.timeout(PATIENCE * 20):
        while not (full := await occupancy()).cache_used:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)
    assert (full.running, full.waiting) == (1, 0)
    assert 0 < full.cache_used <= 1
    running.cancel()
    await asyncio.wait([running])
    async with asyncio.timeout(PATIENCE * 20):
        while (await occupancy()).cache_used != 0:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)


@in_session_loop
async def test_a_prompt_comes_back_as_it_was_sent(session_vllm: VllmEngine) -> None:
    """Echoed by the engine, control characters and all."""
    prompt = "\r\n\t é 漢字 \U0001f600 {}\n"
    body = {"model": "tiny-chat", "prompt": prompt, "max_tokens": 1, "echo": True}

    answers = await ask(session_vllm, request(1, json.dumps(body).encode(), url="/v1/completions"))

    assert json.loads(answers[1].body)["choices"][0]["text"].startswith(prompt)


@in_session_loop
async def test_the_request_id_is_the_engines_too(session_vllm: VllmEngine) -> None:
    """Our files and the engine's log can be joined on it."""
    one = request(7, chat_body("hi"))

    answers = await ask(session_vllm, one)

    assert json.loads(answers[7].body)["id"] == f"chatcmpl-{one.request_id}"


@in_session_loop
async def test_a_busy_engine_lets_its_neighbours_run(session_vllm: VllmEngine) -> None:
    """Its runner lives on the same cores: a short sleep beside a long answer ends in time."""
    answering = asyncio.create_task(ask(session_vllm, request(1, slow_body())))
    longest = 0.0
    for _ in range(100):
        before = time.monotonic()
        await asyncio.sleep(0.02)
        longest = max(longest, time.monotonic() - before)

    assert not answering.done()
    assert longest < 4.0
    answering.cancel()
    await asyncio.wait([answering])


@in_session_loop
async def test_structured_output_works(session_vllm: VllmEngine) -> None:
    """``response_format: json_schema`` constrains even a model that talks nonsense."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    answers = await ask(
        session_vllm, request(1, chat_body("hi", max_tokens=500, response_format=wanted))
    )

    content = json.loads(answers[1].body)["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in {"x", "y"}


@in_session_loop
async def test_no_prompt_reaches_the_log(session_vllm: VllmEngine) -> None:
    """Neither of requests that succeed nor of those that are refused."""
    canary = "canary-5d1f"
    part = {"type": "image_url", "image_url": {"url": f"https://x.invalid/{canary}"}}
    image = {"model": "tiny-chat", "messages": [{"role": "user", "content": [part]}]}
    bodies = [
        chat_body(canary),
        chat_body(canary, model="another"),
        chat_body(canary, max_tokens=99_999),
        chat_body(canary, temperature=canary),
        f'{{"model": "{canary}'.encode(),
        json.dumps(image).encode(),
    ]

    answers = await ask(session_vllm, *(request(tag, body) for tag, body in enumerate(bodies)))

    assert [answers[tag].status for tag in range(6)] == [200, 404, 400, 400, 400, 400]
    running = session_vllm._running
    assert running is not None
    assert canary not in running.log_path.read_text()


@in_session_loop
async def test_a_bad_model_path_fails_the_start_with_the_engines_own_words(
    tmp_path: Path,
) -> None:
    """The message has the model, the exit code, the cause and the log's path."""
    require_vllm()
    engine = vllm_engine(tmp_path, weights="/no/such/model")

    with pytest.raises(EngineStartFailed) as failure:
        await engine.start()

    message = str(failure.value)
    assert "'tiny-chat' ended with exit code 1" in message
    assert "Repo id must be" in message
    assert "'/no/such/model'" in message
    assert str(tmp_path / "engine.log") in message
    assert len(message.splitlines()) <= 21


def test_killing_the_owner_of_a_loading_engine_leaves_no_process(tmp_path: Path) -> None:
    """The same while the engine starts, when its core process has just appeared."""
    require_vllm()
    owner = Owner(tmp_path)
    while "VLLM::EngineCor" not in processes_of(owner.session).values():
        time.sleep(0.1)

    owner.kill()

    assert gone_within(owner.session, 5)


def test_an_embedding_model_is_served(embedded: Embedded) -> None:
    """Embeddings as floats and as base64, scores and ranks, through the same stream."""
    bodies = {tag: body for tag, (status, body) in embedded.answers.items() if status == 200}

    floats = bodies[0]["data"][1]["embedding"]
    packed = base64.b64decode(bodies[1]["data"][1]["embedding"])
    assert struct.unpack(f"<{len(floats)}f", packed) == pytest.approx(floats, abs=1e-6)
    assert len(bodies[2]["data"]) == len(bodies[3]["data"]) == 2
    assert [len(bodies[tag]["results"]) for tag in (4, 5, 6)] == [2, 2, 1]
    assert {"/v1/embeddings", "/v1/score", "/rerank", "/v2/rerank"} <= set(embedded.routes)
    for body in bodies.values():
        # What the tokens of a batch are counted from.
        assert body["usage"]["prompt_tokens"] > 0


def test_embeddings_tell_nothing_and_take_the_salt(embedded: Embedded) -> None:
    """Their usage has no ``cached_tokens``; the answer is the same with and without a salt, and
    neither an answer nor a refusal quotes it."""
    (status, plain), (salted_status, salted), (refused, error) = (
        embedded.answers[tag] for tag in (7, 8, 9)
    )

    assert (status, salted_status, refused) == (200, 200, 400)
    assert not salted["usage"].get("prompt_tokens_details")
    assert salted["usage"] == plain["usage"]
    assert salted["data"] == plain["data"]
    assert "canary" not in json.dumps([salted, error])


def test_nothing_of_the_engine_interrupts_its_worker(serving_owner: Owner) -> None:
    """What wakes beside the worker waits for a free core (decision 2)."""
    session = serving_owner.session
    interrupting = [
        name
        for pid, name in processes_of(session).items()
        if pid != session and os.sched_getscheduler(pid) != os.SCHED_BATCH
    ]

    assert interrupting == ["VLLM::Worker"]


def test_killing_the_owner_of_a_serving_engine_leaves_no_process(serving_owner: Owner) -> None:
    """API server, engine core and worker die with the process that started them."""
    commands = processes_of(serving_owner.session).values()
    assert {"VLLM::EngineCor", "VLLM::Worker"} <= set(commands)

    serving_owner.kill()

    assert gone_within(serving_owner.session, 5)


@in_session_loop
async def test_an_engine_that_hangs_is_started_again(
    session_vllm: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server goes on and calls itself healthy; what it was sent is answered by the next."""
    monkeypatch.setattr(vllm, "STOP_GRACE_SECONDS", 1.0)
    delivered: dict[int, ResultLine] = {}
    first_session = session_of(session_vllm)
    async with Window(session_vllm, timeout_seconds=600, hang_seconds=6) as window:
        # Stopped before it has anything: on a busy machine the metrics may tell of four running
        # requests when they have long been answered.
        os.kill(core_of(session_vllm), signal.SIGSTOP)
        for n in range(4):
            await window.submit(
                WindowRequest(n, f"id-{n}", CHAT, chat_body("hi"), delivered.__setitem__, "test")
            )

        # A busy machine without AVX-512 took more than two minutes to start it.
        async with asyncio.timeout(600):
            while len(delivered) < 4:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.1)

    assert {result.outcome for result in delivered.values()} == {Outcome.OUTPUT}
    assert session_of(session_vllm) != first_session
    assert processes_of(first_session) == {}


@pytest.mark.alone
@in_session_loop
async def test_the_engines_death_in_mid_stream_is_noticed_at_once(
    session_vllm: VllmEngine,
) -> None:
    """EngineLost within a second of the core's SIGKILL, and no answer that only says so.

    The last test of the file: the shared engine is dead afterwards.
    """
    killed_at = 0.0
    answers: list[EngineAnswer] = []

    async def kill_soon() -> None:
        nonlocal killed_at
        assert await Subject(session_vllm, lambda: vllm_running(session_vllm)).runs(8)
        core = core_of(session_vllm)
        killed_at = time.monotonic()
        os.kill(core, signal.SIGKILL)

    async def requests() -> AsyncIterator[EngineRequest]:
        for tag in range(8):
            yield request(tag, slow_body(tag))
        await asyncio.Event().wait()

    async def read() -> None:
        async for answer in session_vllm.stream(requests(), timeout_seconds=60):
            answers.append(answer)  # noqa: PERF401 - what came before the failure counts

    killer = asyncio.create_task(kill_soon())
    with pytest.raises(EngineLost, match="tiny-chat"):
        async with asyncio.timeout(PATIENCE * 60):
            await read()
    lost_at = time.monotonic()
    await killer

    assert answers == []
    assert lost_at - killed_at < 1.0
