"""The API as its clients meet it: a real uvicorn on a loopback port, SQLite and a folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import uvicorn

from batchyard.server import create_app
from batchyard.services.services import Services, open_services
from batchyard.settings import Settings, read_settings
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.engine.base import Engine

ROOT = Path(__file__).resolve().parents[2]
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}\n'


@dataclass
class Api:
    """A running server and two tenants' keys."""

    port: int
    settings: Settings
    key: str
    other_key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def http(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def openai(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key or self.key, **options)

    def async_openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key=self.key, **options)

    def objects(self) -> list[str]:
        """Everything in the object store, half-written files included."""
        root = self.settings.home_folder / "objects"
        return sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())

    def wait_for_objects(self, count: int) -> None:
        """The server notices what a client sent, and that it left, a moment later."""
        deadline = time.monotonic() + PATIENCE * 10
        while len(self.objects()) != count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.objects()) == count

    def raw(self, *pieces: bytes, wait_seconds: float = 10) -> bytes:
        """Send ``pieces`` over a connection of its own; everything that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait_seconds) as connection:
            for piece in pieces:
                connection.sendall(piece)
            return read_all(connection)

    def head(self, method: str, path: str, *lines: str) -> bytes:
        """The start of a raw request, which closes its connection."""
        own = [f"{method} /v1{path} HTTP/1.1", "Host: x", "Connection: close"]
        own.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*own, *lines, "", ""]).encode()


def receive_until(connection: socket.socket, words: bytes) -> None:
    """Return when the server has sent them; it must not end the connection before."""
    received = b""
    while words not in received:
        block = connection.recv(65536)
        assert block
        received += block


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while block := connection.recv(65536):
        received += block
    return received


@pytest.fixture(scope="session")
def migrated_home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A home whose database has its tables and two tenants' keys."""
    home = tmp_path_factory.mktemp("api") / "home"
    return (home, *asyncio.run(make_keys(read_settings(home=home))))


@pytest.fixture
def settings(migrated_home: tuple[Path, str, str], tmp_path: Path) -> Settings:
    home = shutil.copytree(migrated_home[0], tmp_path / "home")
    return read_settings(home=home, limits={"max_bytes": 1024**2})


@pytest.fixture
def keys(migrated_home: tuple[Path, str, str]) -> tuple[str, str]:
    return migrated_home[1:]


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[Services]:
    """The same database and objects as the server's, for a test to look at."""
    async with open_services(settings, engine_for=_no_engine) as opened:
        yield opened


@pytest.fixture
def api(settings: Settings, keys: tuple[str, str]) -> Iterator[Api]:
    with served(settings, keys) as found:
        yield found


@contextlib.contextmanager
def served(settings: Settings, keys: tuple[str, str], *, port: int = 0) -> Iterator[Api]:
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Api(listener.getsockname()[1], settings, *keys)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@dataclass
class ServerProcess:
    """A server of its own, whose memory can be looked at."""

    api: Api
    pid: int

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@pytest.fixture
def server_process(settings: Settings, keys: tuple[str, str]) -> Iterator[ServerProcess]:
    settings = settings.model_copy(
        update={"limits": settings.limits.model_copy(update={"max_bytes": 512 * 1024**2})}
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "BATCHYARD_HOME": str(settings.home),
        "BATCHYARD_LIMITS__MAX_BYTES": str(settings.limits.max_bytes),
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "batchyard.server:create_app"]
    command += ["--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert process.poll() is None
            time.sleep(0.02)
        yield ServerProcess(Api(port, settings, *keys), process.pid)
    finally:
        process.terminate()
        process.wait(PATIENCE * 20)


async def make_keys(settings: Settings) -> tuple[str, str]:
    async with open_services(settings, engine_for=_no_engine) as opened:
        keys = opened.store.api_keys
        one, other = await keys.create("one", "test"), await keys.create("other", "test")
        return one.secret, other.secret


async def _no_engine(model: str) -> Engine:
    raise AssertionError(model)
