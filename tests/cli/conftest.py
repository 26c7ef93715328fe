"""The real command in a process of its own, with stub servers around it and one Prefect API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from batchyard.cli import main
from batchyard.cli.terminal.offline import offline_services
from batchyard.engine.stub.stub import StubEngine
from batchyard.services.services import anything_is_offered
from commands.prefect.own import Access, OwnPrefect
from tests.contract.engine.stub_server import API_KEY, serve
from tests.patience import PATIENCE
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables
from tests.services.up import Yard, running_yard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from prefect.settings import Setting

    from batchyard.services.services import Services
    from batchyard.store import Store

T = TypeVar("T")

CHAT = "/v1/chat/completions"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMMAND_SECONDS = 180.0
_DRAIN_SECONDS = 10.0


@pytest.fixture(scope="package")
def prefect_home() -> Iterator[Path]:
    """Not under pytest's own folders, which are kept: Prefect's database is large."""
    folder = Path(tempfile.mkdtemp(prefix="prefect-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def prefect_access(prefect_home: Path) -> Iterator[Access]:
    """One API for all: each command alone would need seconds to start its own."""
    put_tables(prefect_home)
    server = OwnPrefect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(prefect_home))
        for name, value in HAS_BLOCK_TYPES.items():
            patch.setenv(name, value)
        access = asyncio.run(server.start(prefect_home / "server.log"))
    yield access
    # These talk to one server for as long as they live: not to the next one of other tests, and
    # for a minute to this one when it is gone.
    APILogWorker.drain_all(timeout=_DRAIN_SECONDS)
    EventsWorker.drain_all(timeout=_DRAIN_SECONDS)
    server.stop()


@pytest.fixture(scope="package")
def prefect_settings(prefect_access: Access) -> dict[Setting, str]:
    return {PREFECT_API_URL: prefect_access.url, PREFECT_API_AUTH_STRING: prefect_access.login}


@pytest.fixture(scope="package")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """`batchyard up` in a home in which nothing has run, for the modules named test_up….

    It serves until test_up_starts_and_ends.py, the last of them, has ended it.
    """
    # As on machines of companies, whose proxy reaches the internet and nothing here.
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    proxy |= {"ALL_PROXY": "socks5://127.0.0.1:9"}
    with running_yard(tmp_path_factory.mktemp("yard"), first=True, **proxy) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended and what it said."""

    status: int
    stdout: str
    stderr: str

    @property
    def batch_id(self) -> str:
        """The batch that it speaks of."""
        return next(word.strip(".") for word in self.stderr.split() if word.startswith("batch_"))


@dataclass
class Terminal:
    """A folder, a home and an environment in which to run ``batchyard``."""

    folder: Path
    environment: dict[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self, *words: str, **environment: str | None) -> subprocess.Popen[str]:
        """A command in a process group of its own, as a shell starts it. None removes."""
        changed = self.environment | environment
        return subprocess.Popen(
            [sys.executable, "-m", "batchyard.cli", *words],
            cwd=self.folder,
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        try:
            stdout, stderr = process.communicate(timeout=_COMMAND_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert "Traceback" not in stderr, stderr
        return Ended(process.returncode, stdout, stderr)

    def batchyard(self, *words: str, **environment: str | None) -> Ended:
        return self.finish(self.start(*words, **environment))

    def write(self, name: str, lines: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def read(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def names(self) -> set[str]:
        """What lies in the folder."""
        return {path.name for path in self.folder.iterdir()} - {"home"}


def chat_line(custom_id: str, text: str = "hello", model: str = "stub-model") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


@pytest.fixture
def api_url(yard: Yard) -> str:
    return yard.environment["PREFECT_API_URL"]


@pytest.fixture
def operator(yard: Yard, api_url: str) -> Iterator[httpx.Client]:
    """Who calls Prefect's API with the login and a CSRF token."""
    login = base64.b64encode(yard.prefect_login.encode()).decode()
    with httpx.Client(base_url=api_url, headers={"Authorization": f"Basic {login}"}) as client:
        token = client.get("/csrf-token", params={"client": "test"}).json()["token"]
        client.headers.update({"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"})
        yield client


@pytest.fixture
def terminal(
    tmp_path: Path, home_with_tables: Path, prefect_access: Access, prefect_home: Path
) -> Terminal:
    """A folder with an ``in.jsonl`` of three chat requests."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "BATCHYARD_", "AWS_"))
    }
    ours = {
        "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{os.environ['PYTHONPATH']}",
        "BATCHYARD_HOME": str(home_with_tables),
        "BATCHYARD_ENGINE_API_KEY": API_KEY,
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_API_URL": prefect_access.url,
        "PREFECT_API_AUTH_STRING": prefect_access.login,
    }
    made = Terminal(tmp_path, inherited | ours)
    made.write("in.jsonl", [chat_line(f"id-{n}", f"question {n}") for n in range(3)])
    return made


@pytest.fixture
def here(
    terminal: Terminal,
    prefect_settings: dict[Setting, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Ended]]:
    """The command in this process: its imports take longer than the rest of it."""
    for name, value in terminal.environment.items():
        if name.startswith(("BATCHYARD_", "PREFECT_")):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(terminal.folder)
    with temporary_settings(prefect_settings):
        yield _in_this_process(monkeypatch, capfd)


@pytest.fixture
def alone(
    tmp_path: Path,
    home_with_tables: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """The command in this process with a home of its own, and no Prefect that it knows of."""
    for name in list(os.environ):
        if name.startswith(("BATCHYARD_", "PREFECT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHYARD_HOME", str(home_with_tables))
    monkeypatch.chdir(tmp_path)
    return _in_this_process(monkeypatch, capfd)


def _in_this_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    def run(*words: str) -> Ended:
        monkeypatch.setattr("sys.argv", ["batchyard", *words])
        capfd.readouterr()
        with _same_handlers_afterwards(), pytest.raises(SystemExit) as ended:
            main()
        stdout, stderr = capfd.readouterr()
        status = ended.value.code
        if isinstance(status, str):
            status, stderr = 1, f"{stderr}{status}\n"  # as Python does at exit
        assert "Traceback" not in stderr, stderr
        return Ended(int(status or 0), stdout, stderr)

    return run


@contextlib.contextmanager
def _same_handlers_afterwards() -> Iterator[None]:
    """The command leaves signals to end its process, and this one goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_services(work: Callable[[Services], Awaitable[T]]) -> T:
    """What ``work`` makes of the yard that the environment names, whatever its engines are."""

    async def do() -> T:
        async with offline_services() as services:
            return await work(replace(services, find_offer=anything_is_offered))

    return asyncio.run(do())


def with_store(work: Callable[[Store], Awaitable[T]]) -> T:
    """Likewise, of its store."""
    return with_services(lambda services: work(services.store))


@dataclass
class Background:
    """An event loop in a thread, for servers that answer while a command runs."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def enter(self, manager: AbstractAsyncContextManager[Any]) -> Any:
        return self.wait(self.stack.enter_async_context(manager))

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE * 20)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    thread = threading.Thread(target=made.loop.run_forever)
    thread.start()
    yield made
    made.wait(made.stack.aclose())
    made.loop.call_soon_threadsafe(made.loop.stop)
    thread.join()
    made.loop.close()


@pytest.fixture
def serve_stub(background: Background) -> Callable[..., str]:
    """Serve a stub engine over HTTP; its base URL."""

    @contextlib.asynccontextmanager
    async def running(stub: dict[str, Any]) -> AsyncIterator[str]:
        engine = StubEngine(**stub)
        await engine.start()
        async with serve(engine) as url:
            yield url

    def serve_it(**stub: Any) -> str:
        return str(background.enter(running(stub)))

    return serve_it


@pytest.fixture
def engine_url(serve_stub: Callable[..., str]) -> str:
    """A server with the model ``stub-model`` that answers everything at once."""
    return serve_stub()
