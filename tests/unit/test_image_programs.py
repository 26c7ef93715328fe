"""The programs of the images that ask a server of their own container, run as the images do."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.images.s3.swift_config import KINDS, write_configuration
from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES = Path(__file__).parents[2] / "infra" / "images"
MAKE_BUCKET = "import serve; serve._PORTS['proxy'] = {port}; serve.make_bucket('b', 'a:u', 's')"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.removeprefix("/")))
        self.end_headers()

    def do_PUT(self) -> None:
        self.send_response(200 if self.path == "/b" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that answers ``/STATUS`` with this status."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def ended_with(*words: str, cwd: Path = IMAGES) -> int:
    """The exit status, in an environment that names a proxy which is not there."""
    proxy = f"http://127.0.0.1:{free_port()}"
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={"http_proxy": proxy, "HTTP_PROXY": proxy},
        timeout=30 * PATIENCE,
        check=False,
    ).returncode


@pytest.mark.parametrize(("status", "ended"), [(200, 0), (401, 0), (404, 0), (500, 1), (503, 1)])
def test_a_container_is_healthy_if_its_server_answers(port: int, status: int, ended: int) -> None:
    """Also where a proxy is set for what the container asks of others."""
    assert ended_with("healthcheck.py", f"http://127.0.0.1:{port}/{status}") == ended


def test_a_container_whose_server_does_not_answer_is_not_healthy() -> None:
    assert ended_with("healthcheck.py", f"http://127.0.0.1:{free_port()}/") == 1


def test_the_bucket_is_made_without_a_proxy(port: int) -> None:
    assert ended_with("-c", MAKE_BUCKET.format(port=port), cwd=IMAGES / "s3") == 0


def test_whoever_writes_swifts_configuration_keeps_its_own_http_server(tmp_path: Path) -> None:
    """Swift imports eventlet, which replaces it."""
    ports = dict(zip(KINDS, range(6000, 6004), strict=True))
    write_configuration(
        tmp_path, ports, devices=tmp_path / "devices", login="a:u", secret="s", region="r"
    )
    assert (tmp_path / "object.ring.gz").is_file()
    assert "eventlet" not in sys.modules
