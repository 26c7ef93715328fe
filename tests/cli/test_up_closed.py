"""Who cannot use the Prefect server of ``batchyard up``: web pages, other users of the machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sqlite3
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import websockets

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.services.up import Yard

EVIL = "https://evil.example"
SECONDS = 60.0


def deployment_id(operator: httpx.Client) -> str:
    return str(operator.get("/deployments/name/expire-files/default").json()["id"])


def test_a_web_page_cannot_start_a_flow_run_with_a_command_of_its_own(
    operator: httpx.Client, yard: Yard, api_url: str
) -> None:
    """A POST that a browser sends without asking first, and one as from a program."""
    target = yard.folder / "pwned"
    url = f"{api_url}/deployments/{deployment_id(operator)}/create_flow_run"
    body = {"state": {"type": "SCHEDULED"}, "job_variables": {"command": f"touch {target}"}}
    with httpx.Client() as stranger:
        assert stranger.post(url, json=body, headers={"Origin": EVIL}).status_code == 403
        plain = {"Origin": EVIL, "Content-Type": "text/plain"}
        assert stranger.post(url, content=b"{}", headers=plain).status_code == 403
        assert stranger.get(f"{api_url}/csrf-token", params={"client": "x"}).status_code == 401
    with httpx.Client(headers=operator.headers) as half:
        del half.headers["Authorization"]
        assert half.post(url, json=body).status_code == 401
    with httpx.Client(headers={"Authorization": operator.headers["Authorization"]}) as half:
        assert half.post(url, json=body).status_code == 403
    runs = operator.post("/flow_runs/filter", json={}).json()
    assert not any("command" in (run.get("job_variables") or {}) for run in runs)
    assert not target.exists()


def test_nothing_is_read_without_the_login(api_url: str) -> None:
    with httpx.Client(base_url=api_url) as stranger:
        for path in ("/admin/settings", "/admin/version", "/work_pools/gpu", "/flow_runs/count"):
            assert stranger.get(path).status_code == 401, path


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [(EVIL, False), ("http://127.0.0.1:1", False), ("null", False), ("own", True), ("local", True)],
)
def test_only_prefects_own_page_may_call_it_across_origins(
    api_url: str, origin: str, is_allowed: bool
) -> None:
    port = httpx.URL(api_url).port
    names = {"own": f"http://127.0.0.1:{port}", "local": f"http://localhost:{port}"}
    origin = names.get(origin, origin)
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,prefect-csrf-token",
    }
    with httpx.Client() as browser:
        answer = browser.options(f"{api_url}/flow_runs/filter", headers=asked)
        read = browser.get(f"{api_url}/health", headers={"Origin": origin})
    allowed = origin if is_allowed else None
    assert answer.headers.get("access-control-allow-origin") == allowed
    assert read.headers.get("access-control-allow-origin") == allowed
    assert answer.is_success is is_allowed


@pytest.mark.parametrize("path", ["/api/health", "/api/flow_runs/filter", "/ui-settings", "/"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil"])
def test_a_name_that_was_pointed_at_this_machine_is_refused(
    api_url: str, path: str, host: str
) -> None:
    """DNS rebinding: a page's own name leads to 127.0.0.1."""
    url = httpx.URL(api_url)
    with httpx.Client() as browser:
        headers = {"Host": f"{host}:{url.port}"}
        assert browser.get(url.copy_with(path=path), headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out"])
async def test_a_websocket_without_the_login_is_closed(api_url: str, path: str) -> None:
    """Browsers open them to any origin, and CORS does not speak of them."""
    url = f"{api_url.replace('http', 'ws', 1)}/{path}"
    for protocols in (None, ["prefect"]):
        with contextlib.suppress(websockets.InvalidStatus, websockets.ConnectionClosed):
            async with websockets.connect(
                url, subprotocols=protocols, additional_headers={"Origin": EVIL}
            ) as socket:
                await socket.send('{"type": "auth", "token": "guess:ed"}')
                await asyncio.wait_for(socket.recv(), PATIENCE * 10)
                pytest.fail("it was let in")


def test_prefects_page_asks_for_the_login(api_url: str) -> None:
    with httpx.Client() as browser:
        settings = browser.get(api_url.removesuffix("/api") + "/ui-settings").json()
    assert settings["auth"] == "BASIC"
    assert settings["csrf_enabled"] is True


def test_the_login_is_nowhere_but_in_its_file(yard: Yard, operator: httpx.Client) -> None:
    """After a flow run of a worker, which has it in its environment."""
    ended = run_to_end(operator, deployment_id(operator))
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    login = yard.prefect_login
    password = login.partition(":")[2]
    forms = [password.encode(), base64.b64encode(login.encode())]
    hits = [name for name, content in everything(yard) if any(form in content for form in forms)]
    assert hits == ["prefect.login"]


def test_only_the_owner_can_read_logs_and_prefects_database(yard: Yard) -> None:
    paths = [*(yard.home / "logs").iterdir(), *(yard.home / "prefect").glob("prefect.db*")]
    assert len(paths) >= 5
    assert {f"{path.stat().st_mode & 0o777:o}" for path in paths} == {"600"}
    for name in ("logs", "prefect"):
        assert (yard.home / name).stat().st_mode & 0o777 == 0o700


def run_to_end(operator: httpx.Client, deployment: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE * SECONDS
    made = create_flow_run(operator, deployment, deadline)
    while True:
        run: dict[str, Any] = operator.get(f"/flow_runs/{made['id']}").json()
        if run["state"]["type"] in {"COMPLETED", "FAILED", "CRASHED"}:
            return run
        assert time.monotonic() < deadline, run["state"]
        time.sleep(0.2)


def create_flow_run(operator: httpx.Client, deployment: str, deadline: float) -> dict[str, Any]:
    """Asks again while Prefect's server answers 503: its SQLite is written by somebody else."""
    body = {"state": {"type": "SCHEDULED"}}
    while True:
        answer = operator.post(f"/deployments/{deployment}/create_flow_run", json=body)
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            made: dict[str, Any] = answer.raise_for_status().json()
            return made
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)


def everything(yard: Yard) -> Iterator[tuple[str, bytes]]:
    """Every file, Prefect's database as text (events among it), and every command line."""
    for path in yard.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                yield path.name, path.read_bytes()
    path = yard.home / "prefect" / "prefect.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        text = "\n".join(database.iterdump())
    assert "expire-files" in text
    yield "Prefect's database", text.encode()
    for pid in yard.process_ids():
        with contextlib.suppress(FileNotFoundError):
            yield f"command line of {pid}", Path(f"/proc/{pid}/cmdline").read_bytes()
