"""Prefect's server behind nginx with the committed example, and with its login."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.patience import PATIENCE
from tests.services.nginx import Nginx, running_nginx
from tests.services.prefect import PrefectServer, prefect_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOGIN = "batchyard:secret"
_EMIT = """
from prefect.events import emit_event
from prefect.events.worker import EventsWorker

emit_event("batch.completed", {"prefect.resource.id": "batchyard.batch.one"})
EventsWorker.instance().drain()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    closed = {
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    }
    with prefect_server(tmp_path_factory.mktemp("prefect"), closed) as started:
        yield started


@pytest.fixture(scope="module")
def nginx(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    address = server.api_url.removeprefix("http://").removesuffix("/api")
    folder = tmp_path_factory.mktemp("nginx")
    with running_nginx(folder, [address], "prefect.conf") as started:
        yield started


@pytest.fixture
def machine(server: PrefectServer, nginx: Nginx, tmp_path: Path) -> dict[str, str]:
    """The variables of a machine that reaches the server only through the proxy."""
    return server.environment | {
        "PREFECT_API_URL": api_url(nginx),
        "PREFECT_API_AUTH_STRING": LOGIN,
        "PREFECT_API_SSL_CERT_FILE": str(nginx.ca_file),
        "SSL_CERT_FILE": str(nginx.ca_file),
        "BATCHYARD_HOME": str(tmp_path / "home"),
    }


def api_url(nginx: Nginx) -> str:
    return nginx.url.removesuffix("/v1") + "/api"


def run(machine: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env=machine,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_commands_of_batchyard_and_prefect_reach_it(machine: dict[str, str]) -> None:
    """Their changes too, which need Prefect's token."""
    assert "deployment run-batches/default written" in run(machine, "-m", "batchyard.cli", "deploy")
    said = run(machine, "-m", "batchyard.cli", "doctor", "cli")
    assert f"ok       Prefect   {machine['PREFECT_API_URL']}, " in said
    assert "control" in run(machine, "-m", "prefect", "work-pool", "ls")


def test_events_reach_it_over_websockets(machine: dict[str, str], nginx: Nginx) -> None:
    run(machine, "-c", _EMIT)
    wanted = {"filter": {"event": {"name": ["batch.completed"]}}}
    deadline = time.monotonic() + PATIENCE * 60
    with httpx.Client(verify=nginx.context, auth=tuple(LOGIN.split(":"))) as http:
        token = http.get(f"{api_url(nginx)}/csrf-token", params={"client": "test"}).json()
        http.headers["Prefect-Csrf-Client"] = "test"
        http.headers["Prefect-Csrf-Token"] = token["token"]
        while not (found := http.post(f"{api_url(nginx)}/events/filter", json=wanted).json())[
            "events"
        ]:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)


@pytest.mark.parametrize(("login", "status"), [(None, 401), (LOGIN, 200)])
def test_it_asks_for_the_login(login: str | None, status: int, nginx: Nginx) -> None:
    auth = None if login is None else tuple(login.split(":"))
    answer = httpx.get(f"{api_url(nginx)}/admin/version", auth=auth, verify=nginx.context)
    assert answer.status_code == status


def test_it_is_not_reached_by_another_name(nginx: Nginx) -> None:
    """As a page could that has made its own name lead here."""
    answer = httpx.get(
        f"{api_url(nginx)}/health", headers={"host": "evil.example"}, verify=nginx.context
    )
    assert answer.status_code == 421
