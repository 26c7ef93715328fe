"""How the engine is started, watched and ended, with a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import Abort, EngineRequest, NoAnswer, StartProgress
from batchyard.engine.middleware import line_stream
from batchyard.engine.vllm import vllm
from batchyard.errors import EngineLost, EngineStartFailed
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from batchyard.engine.base import EngineAnswer
    from batchyard.engine.vllm.vllm import VllmEngine
    from batchyard.results.results import ResultLine

    MakeEngine = Callable[..., VllmEngine]

ROOT = Path(__file__).parents[3]


def processes_of(session: int) -> list[int]:
    """Everything alive in a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        if int(after[3]) == session and after[0] != "Z":
            found.append(int(folder.name))
    return found


async def gone(session: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes_of(session):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def taken(log_path: Path) -> str:
    """The text of a log, which is then removed with its folder."""
    text = log_path.read_text()
    log_path.unlink()
    log_path.parent.rmdir()
    return text


def content_of(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def own_engine(python: Path, log_path: Path, mode: str, *leads: str) -> subprocess.Popen[str]:
    """``owner.py`` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("owner.py"), python, log_path, mode, *leads],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def session_of(engine: VllmEngine) -> int:
    assert engine._running is not None
    return engine._running.process.session


async def ask(engine: VllmEngine, *paths: str, then_wait: bool = False) -> list[EngineAnswer]:
    async def requests() -> AsyncIterator[EngineRequest]:
        for tag, path in enumerate(paths):
            yield EngineRequest(tag, path, b"body", f"r{tag}")
        if then_wait:
            await asyncio.Event().wait()

    return [answer async for answer in engine.stream(requests(), timeout_seconds=30)]


async def test_it_starts_answers_and_stops(make_engine: MakeEngine) -> None:
    """After ``stop`` no process is left, not even one that ignores SIGTERM, and no folder."""
    engine = make_engine()
    await engine.start()
    session, running = session_of(engine), engine._running
    assert running is not None

    answers = await ask(engine, "/echo")
    await engine.stop()
    await engine.stop()

    assert [(answer.status, answer.body) for answer in answers] == [(200, b"body")]
    assert not processes_of(session)
    assert not running.folder.exists()


async def test_the_start_tells_how_far_it_has_come(make_engine: MakeEngine) -> None:
    """From the engine's own log, ending with "ready"."""
    seen: list[StartProgress] = []
    engine = make_engine()
    await engine.start(seen.append)
    await engine.stop()

    assert seen[0].message == "starting vLLM"
    assert StartProgress("loading weights 1/2", 0.5) in seen
    assert seen[-1] == StartProgress("ready", 1.0)


async def test_a_log_that_is_removed_while_the_engine_starts_does_not_end_it(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The log is for people; a model that has loaded for minutes is not given up for it."""
    engine = make_engine()

    def remove_log(progress: StartProgress) -> None:
        if progress.message == "starting vLLM":
            (tmp_path / "engine.log").unlink()

    await engine.start(remove_log)
    answers = await ask(engine, "/echo")
    await engine.stop()

    assert [answer.status for answer in answers] == [200]


async def test_a_failed_start_without_a_log_is_a_failed_start(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """With its exit code, and the log's path."""

    def remove_log(_: StartProgress) -> None:
        (tmp_path / "engine.log").unlink(missing_ok=True)

    with pytest.raises(EngineStartFailed, match=r"exit code 1; from its log .*engine\.log"):
        await make_engine(mode="fail").start(remove_log)


async def test_the_socket_and_the_log_are_ours_alone(make_engine: MakeEngine) -> None:
    """0600, in a folder of 0700."""
    engine = make_engine()
    await engine.start()
    running = engine._running
    assert running is not None
    paths = [running.socket_path, running.folder, running.log_path]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in paths]
    await engine.stop()

    assert modes == [0o600, 0o700, 0o600]


async def test_a_long_temporary_folder_does_not_break_the_socket(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path may have 107 bytes; beyond that it goes to /tmp."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    engine = make_engine()
    await engine.start()
    await engine.stop()

    assert list(long.iterdir()) == []


async def test_the_engine_sees_nothing_of_ours(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No secrets in its environment, nothing of Batchyard to import, no usage reports."""
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", "postgresql://u:secret@h/d")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = make_engine()
    await engine.start()
    answers = await ask(engine, "/env")
    await engine.stop()

    environment = json.loads(answers[0].body)
    assert "secret" not in json.dumps(environment)
    assert environment["PYTHONPATH"] == str(Path(line_stream.__file__).parent)
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"


async def test_a_failed_start_says_why(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Model, exit code, the engine's own words, and where its log is."""
    with pytest.raises(EngineStartFailed) as failure:
        await make_engine(mode="fail").start()

    message = str(failure.value)
    assert "'fake' ended with exit code 1" in message
    assert "ValueError: no such thing" in message
    assert str(tmp_path / "engine.log") in message


async def test_without_a_log_path_a_failed_starts_log_is_kept(make_engine: MakeEngine) -> None:
    """It is the only evidence."""
    with pytest.raises(EngineStartFailed) as failure:
        await make_engine(mode="fail", log_path=None).start()

    log_path = Path(str(failure.value).split("from its log ")[1].split(":")[0])
    assert "no such thing" in taken(log_path)


async def test_an_interpreter_that_does_not_exist_fails_the_start(
    make_engine: MakeEngine,
) -> None:
    """The path is in the message."""
    with pytest.raises(EngineStartFailed, match="/no/such/python"):
        await make_engine(python=Path("/no/such/python")).start()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made: its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    "wrong",
    [{"log_path": Path("/dev/null/engine.log")}, {"adapters": {"sql": "/no/such/adapter"}}],
)
async def test_an_engine_that_cannot_be_launched_leaves_no_folder(
    make_engine: MakeEngine, temporary: Path, wrong: dict[str, Any]
) -> None:
    """Its runner is started again every few minutes, for as long as batches wait."""
    with pytest.raises(EngineStartFailed):
        await make_engine(**wrong).start()

    assert content_of(temporary) == []


async def test_an_engine_that_never_gets_ready_is_killed(make_engine: MakeEngine) -> None:
    """After the start time-out, with the last lines of its log."""
    sessions: list[int] = []
    engine = make_engine(mode="hang", start_timeout_seconds=1.0)

    with pytest.raises(EngineStartFailed, match="not ready after 1 s"):
        await engine.start(lambda _: sessions.append(session_of(engine)))

    assert await gone(sessions[0])


async def test_a_cancelled_start_leaves_nothing(make_engine: MakeEngine) -> None:
    """Nothing that nobody waits for goes on loading."""
    engine = make_engine(mode="hang")
    task = asyncio.create_task(engine.start())
    while engine._running is None:  # noqa: ASYNC110 - the test looks from outside
        await asyncio.sleep(0.02)
    session = session_of(engine)
    await asyncio.sleep(0.3)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await gone(session)


@pytest.mark.parametrize(
    ("mode", "moment"),
    [("", "starting vLLM"), ("hang", "starting the engine"), ("", "ready")],
    ids=["launching", "loading", "serving"],
)
async def test_nothing_outlives_the_owners_sigkill(
    fake_python: Path, tmp_path: Path, mode: str, moment: str
) -> None:
    """Not the engine, not its child that ignores SIGTERM, not the guardian, at any moment."""
    owner = own_engine(fake_python, tmp_path / "log", mode)
    assert owner.stdout is not None
    for line in owner.stdout:
        session, folder, message = line.rstrip("\n").split(" ", 2)
        if message == moment:
            break
    assert processes_of(int(session))

    owner.kill()
    owner.wait()

    assert await gone(int(session))
    assert not list(Path(folder).parent.glob(Path(folder).name))


async def test_the_guardians_own_death_takes_the_engine_down(make_engine: MakeEngine) -> None:
    """We notice, and do its work."""
    engine = make_engine()
    await engine.start()
    session = session_of(engine)

    os.kill(session, signal.SIGKILL)

    assert await gone(session)
    with pytest.raises(EngineLost):
        await ask(engine, "/echo")


@pytest.mark.alone
@pytest.mark.parametrize("paths", [(), ("/hang", "/hang")], ids=["idle", "busy"])
async def test_the_servers_death_in_mid_stream_is_noticed_at_once(
    make_engine: MakeEngine, paths: tuple[str, ...]
) -> None:
    """EngineLost within a second of SIGKILL, with the exit code."""
    engine = make_engine()
    await engine.start()
    reader = asyncio.create_task(ask(engine, *paths, then_wait=True))
    await asyncio.sleep(0.3)
    server = min(set(processes_of(session_of(engine))) - {session_of(engine)})

    os.kill(server, signal.SIGKILL)
    killed_at = time.monotonic()
    with pytest.raises(EngineLost, match="exit code -9"):
        await reader

    assert time.monotonic() - killed_at < 1.0


async def test_the_death_of_the_engine_below_the_server_is_no_answer(
    make_engine: MakeEngine,
) -> None:
    """The 500s and 503s of a server whose engine has died are EngineLost."""
    engine = make_engine()
    await engine.start()

    with pytest.raises(EngineLost):
        await ask(engine, "/hang", "/die", then_wait=True)
    await engine.stop()


async def test_an_abort_is_owed_no_answer_and_its_request_is_owed_one(
    make_engine: MakeEngine,
) -> None:
    """The stream ends when every request has its answer, even in an engine that does not listen."""
    engine = make_engine()
    await engine.start()

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        yield EngineRequest(1, "/hang", b"", "r1")
        yield EngineRequest(2, "/echo", b"body", "r2")
        await asyncio.sleep(0.1)
        for tag in (1, 2, 3):
            yield Abort(tag)

    answers = [answer async for answer in engine.stream(requests(), timeout_seconds=30)]

    assert [(one.tag, one.status, one.no_answer) for one in answers] == [
        (2, 200, None),
        (1, None, NoAnswer.ABORTED),
    ]


async def test_an_error_of_the_caller_ends_a_stream_on_which_nothing_moves(
    make_engine: MakeEngine,
) -> None:
    """At once: there may be no answer for hours."""
    engine = make_engine()
    await engine.start()

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, "/hang", b"", "r1")
        await asyncio.sleep(0.3)
        raise LookupError("the plan is gone")

    async def read() -> None:
        async for _ in engine.stream(requests(), timeout_seconds=30):
            pass

    with pytest.raises(LookupError, match="the plan is gone"):
        await asyncio.wait_for(read(), PATIENCE * 20)


async def test_an_engine_that_hangs_under_a_healthy_server_is_started_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that hangs it each time, and alone, is given up after the second."""
    monkeypatch.setattr(vllm, "STOP_GRACE_SECONDS", 0.2)
    engine = make_engine()
    await engine.start()
    first = session_of(engine)
    delivered: asyncio.Queue[ResultLine] = asyncio.Queue()

    async with Window(engine, timeout_seconds=60, hang_seconds=1.0) as window:
        await window.submit(
            WindowRequest(1, "id", "/hang", b"", lambda _, one: delivered.put_nowait(one), "test")
        )
        result = await asyncio.wait_for(delivered.get(), PATIENCE * 30)

    assert json.loads(result.line)["error"]["code"] == "engine_crash"
    assert not processes_of(first)


async def test_it_can_be_started_again_after_it_was_lost(make_engine: MakeEngine) -> None:
    """A poison request costs a restart, not the runner."""
    engine = make_engine()
    await engine.start()
    first = session_of(engine)
    with pytest.raises(EngineLost):
        await ask(engine, "/die")

    await engine.start()
    answers = await ask(engine, "/echo")
    await engine.stop()

    assert answers[0].status == 200
    assert not processes_of(first)


async def test_a_server_that_falls_silent_is_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process closes no connection: the missing signs of life tell."""
    monkeypatch.setattr("batchyard.engine.vllm.line_client.SILENCE_SECONDS", 0.5)
    engine = make_engine()
    await engine.start()
    reader = asyncio.create_task(ask(engine, "/hang"))
    await asyncio.sleep(0.2)
    for process in set(processes_of(session_of(engine))) - {session_of(engine)}:
        os.kill(process, signal.SIGSTOP)

    with pytest.raises(EngineLost, match="imeout"):
        await reader
    monkeypatch.setattr(vllm, "STOP_GRACE_SECONDS", 0.2)
    session = session_of(engine)
    await engine.stop()

    assert not processes_of(session)


async def test_an_engine_that_is_not_running_is_lost(make_engine: MakeEngine) -> None:
    """Before ``start`` and after ``stop``, whatever is asked of it."""
    engine = make_engine()

    with pytest.raises(EngineLost, match="not running"):
        await ask(engine, "/echo")
    with pytest.raises(EngineLost, match="not running"):
        await engine.routes()


async def test_its_routes_are_asked_for_once_in_each_life(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    asked = []

    async def get(path: str) -> bytes:
        asked.append(path)
        return b'{"paths":{"/v1/%d":{"post":{}}}}' % len(asked)

    monkeypatch.setattr(engine, "_get", get)
    for life in (1, 2):
        await engine.start()
        assert await engine.routes() == {f"/v1/{life}": None}
        assert await engine.routes() == {f"/v1/{life}": None}
        await engine.stop()


async def test_the_reason_of_a_loss_is_logged_and_no_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own log is a file of its machine, or pod. A flow run's log gets what we log."""
    engine = make_engine()
    await engine.start()
    with pytest.raises(EngineLost):
        await ask(engine, "/crash", then_wait=True)
    await engine.stop()
    assert "engine.log model=fake torch.OutOfMemoryError: CUDA out of memory." in caplog.text
    assert "secret" not in caplog.text
