"""OpenStack Swift with its S3 front: a real S3 server, started on loopback for a test session.

It checks signatures, expiry, signed headers, Range and If-Match as S3 does, which in-process
fakes do not. Four processes, about 230 MiB; files need a file system with extended attributes.

Use :func:`swift_for_session` from a session-scoped fixture. Without Swift's programs the test
is skipped at the desk and fails in CI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.storage.bucket import S3Credentials
from infra.images.s3.swift_config import BACKENDS, KINDS, write_configuration
from tests.patience import PATIENCE
from tests.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 10.0

BUCKET = "batches"
"""The one that tests use."""


@dataclass(frozen=True, slots=True)
class SwiftServer:
    """Where the server listens and the one account it knows."""

    endpoint_url: str
    root: Path = field(repr=False)
    region: str = "us-east-1"
    access_key_id: str = "test:tester"
    secret_access_key: str = "testing"
    _proxy: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    @property
    def credentials(self) -> S3Credentials:
        """What a client logs in with."""
        return S3Credentials(
            endpoint_url=self.endpoint_url,
            region=self.region,
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
        )

    @property
    def variables(self) -> dict[str, str]:
        """The same, as the environment of a process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }

    def go_away(self) -> None:
        """SIGKILL to what clients speak to; what is stored stays."""
        (proxy,) = self._proxy
        proxy.kill()
        proxy.wait()

    def come_back(self) -> None:
        """Return when it answers again, where it was."""
        self._proxy[:] = [_start(self.root, "proxy")]
        _wait_until_healthy(f"{self.endpoint_url}/healthcheck", self._proxy, self.root)


@contextlib.contextmanager
def swift_for_session(root: Path) -> Iterator[SwiftServer]:
    """Run Swift with everything it writes under ``root``; stop it on the way out."""
    _require_programs()
    ports = dict(zip(KINDS, free_ports(len(KINDS)), strict=True))
    server = SwiftServer(f"http://127.0.0.1:{ports['proxy']}", root)
    write_configuration(
        root,
        ports,
        devices=root / "devices",
        login=server.access_key_id,
        secret=server.secret_access_key,
        region=server.region,
    )
    with contextlib.ExitStack() as stack:
        processes = []
        for kind in BACKENDS:
            processes.append(_start(root, kind))
            stack.callback(_stop, processes[-1])
        server._proxy.append(_start(root, "proxy"))
        stack.callback(lambda: _stop(server._proxy[0]))
        for kind in BACKENDS:
            _wait_until_healthy(f"http://127.0.0.1:{ports[kind]}/", processes, root)
        _wait_until_healthy(f"{server.endpoint_url}/healthcheck", server._proxy, root)
        yield server


def _require_programs() -> None:
    missing = [kind for kind in KINDS if not _program(kind).exists()]
    if not missing:
        return
    message = f"swift is not installed (no swift-{missing[0]}-server): install requirements/dev.txt"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _program(kind: str) -> Path:
    return Path(sys.executable).parent / f"swift-{kind}-server"


def _start(root: Path, kind: str) -> subprocess.Popen[bytes]:
    with (root / f"{kind}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, _program(kind), root / f"{kind}.conf", "--verbose"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_healthy(url: str, processes: list[subprocess.Popen[bytes]], root: Path) -> None:
    deadline = time.monotonic() + PATIENCE * _START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break
        try:
            with urllib.request.urlopen(url, timeout=1.0):  # noqa: S310 — our own http URL
                return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.05)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(root.glob("*.log")))
    pytest.fail(f"Swift did not start:\n{logs}")
