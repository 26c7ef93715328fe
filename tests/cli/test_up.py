"""``batchyard up``: everything on one machine. With an engine: tests/up."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from tests.services.up import Yard, running_yard, start_yard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 30.0


@pytest.fixture(scope="module", name="yard")
def yard_without_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running_yard(tmp_path_factory.mktemp("yard")) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Yard]]:
    """Starts it without waiting; whatever is left of it is killed."""
    started = []

    def start_it(**environment: str) -> Yard:
        yard = start_yard(tmp_path, **environment)
        started.append(yard)
        return yard

    yield start_it
    for yard in started:
        for pid in {yard.process.pid, *yard.process_ids()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        yard.process.wait()


def test_it_says_where_everything_is(yard: Yard) -> None:
    said = yard.said()
    assert f"The API:       {yard.url}\n" in said
    assert f"Its key:       {yard.key}\n" in said
    assert f"Logs:          {yard.home}/logs\n" in said
    assert yard.environment["PREFECT_API_URL"] in said


def test_the_key_that_it_prints_opens_the_api(yard: Yard) -> None:
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
        assert [model.id for model in client.models.list()] == ["tiny-chat"]
        assert list(client.batches.list()) == []


def test_the_ui_calls_the_port_that_prefect_has(yard: Yard) -> None:
    url = yard.environment["PREFECT_API_URL"]
    with httpx.Client() as client:
        settings = client.get(url.removesuffix("/api") + "/ui-settings").json()
    assert settings["api_url"] == url


def test_no_log_has_the_key(yard: Yard) -> None:
    for path in (yard.home / "logs").iterdir():
        assert yard.key not in path.read_text(errors="replace"), path


def test_what_ends_by_itself_ends_everything(yard: Yard) -> None:
    """The last one with this yard. It says what it was and where its log is."""
    (api,) = [pid for pid in yard.process_ids() if b"serve" in words_of(pid)]
    os.kill(api, signal.SIGKILL)
    assert yard.process.wait(SECONDS) == 1
    assert f"batchyard: api has ended; its log: {yard.home}/logs/api.log\n" in yard.said()
    assert yard.is_over()


def test_ctrl_c_while_it_starts_leaves_nothing_behind(start: Callable[..., Yard]) -> None:
    yard = start()
    deadline = time.monotonic() + SECONDS
    while len(yard.process_ids()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert yard.interrupt() == 0
    assert yard.is_over()


@pytest.mark.parametrize(
    ("variable", "option"),
    [("BATCHYARD_API_PORT", "--port"), ("PREFECT_SERVER_API_PORT", "--prefect-port")],
)
def test_a_taken_port_is_a_clear_error(
    start: Callable[..., Yard], variable: str, option: str
) -> None:
    """Before anything is started or written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        yard = start(**{variable: port})
        assert yard.process.wait(SECONDS) == 1
    said = yard.said()
    assert f"port {port} (Address already in use): choose another with {option} " in said
    assert variable in said
    assert "Stopping" not in said
    assert not yard.home.exists()


def words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
