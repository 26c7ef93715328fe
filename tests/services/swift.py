"""OpenStack Swift with its S3 front: a real S3 server, started on loopback for a test session.

It checks signatures, expiry, signed headers, Range and If-Match as S3 does, which in-process
fakes do not. Four processes, about 230 MiB; files need a file system with extended attributes.

Use :func:`swift_for_session` from a session-scoped fixture. Without Swift's programs the test
is skipped at the desk and fails in CI.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKENDS = ("account", "container", "object")
_START_TIMEOUT_SECONDS = 60.0
_STOP_TIMEOUT_SECONDS = 10.0

_SWIFT_CONF = """\
[swift-hash]
swift_hash_path_suffix = batchyard-tests

[storage-policy:0]
name = only
default = yes
"""

_SERVER = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {root}
log_address = {root}/no-syslog
log_level = WARNING
"""

_BACKEND = """\
devices = {root}/devices
mount_check = false
fallocate_reserve = 0
disable_fallocate = true

[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}
"""

_PROXY = """\

[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck proxy-logging listing_formats bulk tempurl s3api \
tempauth slo dlo versioned_writes copy proxy-logging proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true

[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin

[filter:s3api]
use = egg:swift#s3api
location = {region}
s3_acl = false

[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:tempurl]
use = egg:swift#tempurl
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
[filter:copy]
use = egg:swift#copy
"""


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
    ports = _free_ports(len(_BACKENDS) + 1)
    proxy_port = ports.pop()
    (root / "devices" / "disk").mkdir(parents=True)
    (root / "swift.conf").write_text(_SWIFT_CONF)
    for kind, port in zip(_BACKENDS, ports, strict=True):
        _write_ring(root, kind, port)
        _write_conf(root, kind, port, _BACKEND)
    server = SwiftServer(f"http://127.0.0.1:{proxy_port}", root)
    _write_conf(root, "proxy", proxy_port, _PROXY, region=server.region)
    with contextlib.ExitStack() as stack:
        processes = []
        for kind in _BACKENDS:
            processes.append(_start(root, kind))
            stack.callback(_stop, processes[-1])
        server._proxy.append(_start(root, "proxy"))
        stack.callback(lambda: _stop(server._proxy[0]))
        for port in ports:
            _wait_until_healthy(f"http://127.0.0.1:{port}/", processes, root)
        _wait_until_healthy(f"{server.endpoint_url}/healthcheck", server._proxy, root)
        yield server


def _require_programs() -> None:
    missing = [kind for kind in (*_BACKENDS, "proxy") if not _program(kind).exists()]
    if not missing:
        return
    message = f"swift is not installed (no swift-{missing[0]}-server): install requirements/dev.txt"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _program(kind: str) -> Path:
    return Path(sys.executable).parent / f"swift-{kind}-server"


def _free_ports(count: int) -> list[int]:
    """Ports free now, all held until the last one is known so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write_conf(root: Path, kind: str, port: int, template: str, **more: str) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    text = (_SERVER + template).format(root=root, kind=kind, port=port, user=user, **more)
    (root / f"{kind}.conf").write_text(text)


def _write_ring(root: Path, kind: str, port: int) -> None:
    """One device, one replica, two partitions: the smallest ring that Swift accepts."""
    from swift.common.ring.builder import (  # type: ignore[import-untyped]  # noqa: PLC0415
        RingBuilder,
    )

    builder = RingBuilder(part_power=1, replicas=1, min_part_hours=0)
    builder.add_dev(
        {"region": 1, "zone": 1, "weight": 1, "ip": "127.0.0.1", "port": port, "device": "disk"}
    )
    builder.rebalance()
    builder.get_ring().save(str(root / f"{kind}.ring.gz"))


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
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
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
