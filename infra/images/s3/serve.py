"""The S3 server's container: Swift's four servers, one bucket, and their upkeep once an hour.

    S3_SECRET_KEY     must be set
    S3_ACCESS_KEY     account:user; batchyard:batchyard
    S3_BUCKET         made if it is not there; batches
    S3_REGION         us-east-1
    S3_UPKEEP_SECONDS 3600
    S3_RECLAIM_SECONDS 86400; how long the marker of a deleted object is kept

It ends if one of the servers ends, so that the container is started again as a whole. SIGTERM
ends everything.
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from swift_config import BACKENDS, KINDS, RECLAIM_SECONDS, write_configuration

_CONFIGURATION = Path("/etc/swift")
"""Where the programs of the upkeep look, whatever they are told."""
_DATA = Path("/var/lib/s3")
_PORTS = {"account": 6202, "container": 6201, "object": 6200, "proxy": 9000}
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_BIN = Path(sys.executable).parent
# Deleted objects leave a marker on disk and a row in their container's database. Uploads whose
# container was busy wait on disk to be listed.
_UPKEEP = (
    ("swift-object-updater", "object"),
    ("swift-object-replicator", "object"),
    ("swift-container-replicator", "container"),
    ("swift-account-replicator", "account"),
)


class Server:
    """The processes of this container."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all four; the proxy comes last because it needs the others."""
        for kind in KINDS:
            program = _BIN / f"swift-{kind}-server"
            words = [program, _CONFIGURATION / f"{kind}.conf", "--verbose"]
            self._processes[kind] = subprocess.Popen([sys.executable, *words])
        for kind in BACKENDS:
            self._wait_for(f"http://127.0.0.1:{_PORTS[kind]}/")
        self._wait_for(f"http://127.0.0.1:{_PORTS['proxy']}/healthcheck")

    def run(self, upkeep_seconds: float) -> NoReturn:
        """Upkeep from time to time. Raises SystemExit when one of the servers has ended."""
        due = time.monotonic() + upkeep_seconds
        while True:
            for kind, process in self._processes.items():
                if process.poll() is not None:
                    sys.exit(f"swift-{kind}-server has ended with {process.returncode}")
            if time.monotonic() >= due:
                for program, kind in _UPKEEP:
                    words = [_BIN / program, _CONFIGURATION / f"{kind}.conf", "--once"]
                    subprocess.run([sys.executable, *words], check=False)
                due = time.monotonic() + upkeep_seconds
            time.sleep(1.0)

    def stop(self) -> None:
        """End what runs; after ten seconds by force."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _wait_for(self, url: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if any(process.poll() is not None for process in self._processes.values()):
                sys.exit("One of Swift's servers has not started; see above.")
            try:
                with _opener().open(url, timeout=1.0):
                    return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError:
                if time.monotonic() > deadline:
                    sys.exit(f"{url} does not answer.")
                time.sleep(0.1)


def _opener() -> urllib.request.OpenerDirector:
    """For servers of this container. A proxy that the variables name cannot reach them."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def make_bucket(name: str, login: str, secret: str) -> None:
    """Make the bucket if it is not there. The older of S3's signatures needs no library."""
    date = email.utils.formatdate(usegmt=True)
    text = f"PUT\n\n\n{date}\n/{name}"
    digest = hmac.digest(secret.encode(), text.encode(), "sha1")
    signature = base64.b64encode(digest).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{_PORTS['proxy']}/{name}",
        headers={"Date": date, "Authorization": f"AWS {login}:{signature}"},
        method="PUT",
    )
    try:
        with _opener().open(request, timeout=10):
            pass
    except urllib.error.HTTPError as refused:
        if refused.code != HTTPStatus.CONFLICT:
            sys.exit(f"The bucket {name} cannot be made: HTTP {refused.code}.")


def main() -> None:
    """Run until SIGTERM, or until a server ends."""
    secret = os.environ.get("S3_SECRET_KEY", "")
    login = os.environ.get("S3_ACCESS_KEY") or "batchyard:batchyard"
    if not secret or any(character.isspace() for character in secret):
        sys.exit("S3_SECRET_KEY is not set, or has a space in it: give the server a secret key.")
    if len(login.split(":")) != 2 or "_" in login:
        sys.exit("S3_ACCESS_KEY is account:user, without underscores.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    write_configuration(
        _CONFIGURATION,
        _PORTS,
        devices=_DATA,
        login=login,
        secret=secret,
        region=os.environ.get("S3_REGION") or "us-east-1",
        address="0.0.0.0",  # noqa: S104 - a container's own
        reclaim_seconds=int(os.environ.get("S3_RECLAIM_SECONDS") or RECLAIM_SECONDS),
    )
    server = Server()
    try:
        server.start()
        make_bucket(os.environ.get("S3_BUCKET") or "batches", login, secret)
        print("The S3 server answers on port 9000.", flush=True)  # noqa: T201 - for the container's log
        server.run(float(os.environ.get("S3_UPKEEP_SECONDS") or 3600))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
