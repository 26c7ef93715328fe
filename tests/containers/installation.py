"""What docs/deploy/compose.md has people do, done for a test: its folder, its commands."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from tests.containers.tools import POSTGRES, ROOT, Podman
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMPOSE = ROOT / "infra" / "compose"
PROJECT = "batchyard"
LEASE_SECONDS = 10

_SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
# Without systemd, podman waits ten seconds for it at each start and each stop of a container that
# has a check. The tests run the checks themselves.
_NO_TIMERS = {name: {"healthcheck": {"disable": True}} for name in _SERVICES}
_START_SECONDS = 300.0
# Before the tables of the file. A test does not wait for a minute until a lease has expired.
_SETTINGS = f"""\
lease_seconds = {LEASE_SECONDS}.0
chunk_requests = 20
flush_seconds = 0.5
allow_private_urls = true

"""


@dataclass
class Installation:
    """A copy of infra/compose with an .env of its own, and what runs from it."""

    podman: Podman
    folder: Path
    api_port: int

    def compose(self, *words: str, timeout: float = 300) -> str:
        """podman-compose in the folder, as ``docker compose`` would be used."""
        return self.podman.run(
            "podman-compose", *words, timeout=timeout, cwd=self.folder
        ).stdout.strip()

    def command(self, *words: str) -> str:
        """A command of Batchyard in the API's container; the last line that it prints."""
        return self.podman.output("podman", "exec", container("api"), *words).splitlines()[-1]

    def set_variables(self, **values: str) -> None:
        """Change .env, also what is commented out in it."""
        env = self.folder / ".env"
        text = env.read_text()
        for name, value in values.items():
            line = f"{name}={value}"
            text, count = re.subn(rf"^(# )?{name}=.*$", line, text, flags=re.MULTILINE)
            assert count == 1
        env.write_text(text)

    def up(self) -> None:
        """Return when the API answers."""
        self.compose("up", "--detach", "--no-build", timeout=600)
        wait(lambda: answers(f"{self.url}/models"), "the API", self.story)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}/v1"

    @property
    def gateway(self) -> str:
        """The address of this machine on the network of the containers."""
        (network,) = json.loads(
            self.podman.output("podman", "network", "inspect", f"{PROJECT}_default")
        )
        return str(network["subnets"][0]["gateway"])

    def process_id(self, service: str) -> int:
        words = ("podman", "inspect", "--format", "{{.State.Pid}}", container(service))
        return int(self.podman.output(*words))

    def crash(self, service: str) -> None:
        """SIGKILL to a container's first process, and so to all of them: an OOM kill, for one."""
        os.kill(self.process_id(service), signal.SIGKILL)

    def is_running(self, service: str) -> bool:
        words = ("podman", "inspect", "--format", "{{.State.Running}}", container(service))
        return self.podman.run(*words, check=False).stdout.strip() == "true"

    def exit_code(self, service: str) -> int | None:
        """None while it runs."""
        words = ("podman", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}")
        status, _, code = self.podman.output(*words, container(service)).partition(" ")
        return int(code) if status == "exited" else None

    def is_healthy(self, service: str) -> bool:
        """What its check says: that of the compose file, or that of its image."""
        check = _SERVICES[service].get("healthcheck", {}).get("test")
        if check is None:
            (image,) = json.loads(
                self.podman.output("podman", "image", "inspect", self.image(service))
            )
            check = image["Healthcheck"]["Test"]
        kind, *words = check
        assert kind == "CMD"
        done = self.podman.run("podman", "exec", container(service), *words, check=False)
        return done.returncode == 0

    def image(self, service: str) -> str:
        words = ("podman", "inspect", "--format", "{{.ImageName}}")
        return self.podman.output(*words, container(service))

    def story(self) -> str:
        """The ends of all logs, for whoever has to find out why a test failed."""
        said = [self.podman.run("podman", "ps", "--all", check=False).stdout]
        for name in self.podman.output("podman", "ps", "--all", "--format", "{{.Names}}").split():
            log = self.podman.run("podman", "logs", "--tail", "25", name, check=False)
            said.append(f"--- {name}\n{log.stdout}{log.stderr}")
        return "\n".join(said)


@contextlib.contextmanager
def installation(podman: Podman, folder: Path) -> Iterator[Installation]:
    """Everything is made as the page says, and gone afterwards, volumes too."""
    here = folder / "compose"
    shutil.copytree(COMPOSE, here, ignore=shutil.ignore_patterns(".env"))
    podman.run("sh", "./secrets.sh", cwd=here)
    made = Installation(podman, here, free_port())
    made.set_variables(
        API_ADDRESS=f"127.0.0.1:{made.api_port}",
        PREFECT_ADDRESS=f"127.0.0.1:{free_port()}",
        POSTGRES_IMAGE=POSTGRES,
    )
    (here / "compose.override.yaml").write_text(yaml.safe_dump({"services": _NO_TIMERS}))
    settings = here / "batchyard.toml"
    settings.write_text(_SETTINGS + settings.read_text())
    try:
        made.up()
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "5", timeout=600)


def container(service: str) -> str:
    return f"{PROJECT}_{service}_1"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own
            return True
    except urllib.error.HTTPError as refused:
        return refused.code < 500
    except OSError:
        return False


def wait(
    condition: Callable[[], Any],
    what: str,
    story: Callable[[], str],
    seconds: float = _START_SECONDS,
) -> Any:
    """What ``condition`` gives, once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {seconds} s: {what}\n{story()}")
        time.sleep(0.2)
    return found


@dataclass
class Hooks:
    """Events that have come to a server on this machine, with their headers."""

    port: int
    events: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@contextlib.contextmanager
def hooks() -> Iterator[Hooks]:
    """A server that containers reach at the gateway of their network."""
    found = Hooks(0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.events.append(({k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler)  # noqa: S104
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
