"""``batchyard up``: everything on this machine, in the foreground, until Ctrl-C.

Prefect's server and UI, what `batchyard deploy` makes there, a worker on each pool, and the API.
If no batchyard.toml has models, the model is the tiny one of `make setup` or `batchyard engine
tiny-models`. Everything it writes is under
``BATCHYARD_HOME``. docs/how-to/run-from-prefect.md does the same by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from batchyard.cli.operate.serve import listening
from batchyard.cli.tenants.local_key import local_key_file, login_link
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.options import DEFAULT_PORT, PORT_VARIABLE
from batchyard.cli.terminal.progress import ProgressDisplay
from batchyard.cli.terminal.say import say
from batchyard.cli.terminal.stoppable import stop_signals
from batchyard.dispatch import PrefectApi, start_reconciler
from batchyard.errors import SettingsError
from batchyard.logs.rotation import rotate
from batchyard.processes.guarded_process import GuardedProcess
from batchyard.services.machine.connections import connections
from batchyard.services.machine.home import HomeWatch, in_home
from batchyard.services.services import Progress
from batchyard.settings import read_settings
from batchyard.settings_sources import CONFIG_VARIABLE, config_file, read_config
from batchyard.web.proxies import check_proxies
from commands import shipped
from commands.first_answer import first_answer
from commands.prefect.closed import (
    LOGIN_FILE,
    PRIVATE_UMASK,
    client_environment,
    login_file,
    read_login,
    server_command,
    server_environment,
)
from commands.prefect.lean import LEAN_SERVER
from commands.prefect.pools import CONTROL_POOL, DEFAULT_POOL, gpu_pools
from commands.prefect_worker import PREFECT_WORKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BIN = Path(sys.executable).parent
_PREFECT_PORT_VARIABLE = "PREFECT_SERVER_API_PORT"
# In memory, places in deployments stay taken when the server is started again.
_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 10.0

_TINY_MODEL = """\
# Written by `batchyard up`, for as long as no batchyard.toml has models.
[engines_at_once]
gpu = 1
"""
_TINY_MODEL_BLOCK = """
[[models]]
model = "{name}"
weights = {weights}
options = "--max-model-len 2048 --enforce-eager"
"""

_TINY = "tiny-chat"
_EXAMPLE_ENDPOINT = "/v1/chat/completions"


def register(app: typer.Typer) -> None:
    """Add the command; an entry point of the group ``batchyard.commands``."""
    app.command("up")(up)


def up(
    port: Annotated[
        int, typer.Option(min=1, max=65535, envvar=PORT_VARIABLE, help="The port of the API.")
    ] = DEFAULT_PORT,
    prefect_port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65535,
            envvar=_PREFECT_PORT_VARIABLE,
            help="The port of Prefect's server and UI.",
        ),
    ] = 4200,
) -> None:
    """Run everything on this machine until Ctrl-C: the API, Prefect, a worker on each pool."""
    check_proxies(os.environ)
    with listening("127.0.0.1", port), _prefect_listening(prefect_port):
        pass
    everything = Everything(read_settings().home_folder, port, prefect_port)
    numbers = stop_signals()
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        with ProgressDisplay() as display:
            everything.start(display)
        say(everything.start_text())
        everything.wait_for_an_end()
    except KeyboardInterrupt:
        pass
    finally:
        for number in numbers:  # a second Ctrl-C would leave half of it running
            signal.signal(number, signal.SIG_IGN)
        say("Stopping …")
        everything.stop()


class Everything:
    """The processes of ``batchyard up``. Each writes a log of its own into the home."""

    def __init__(self, home: Path, port: int, prefect_port: int) -> None:
        self._home = home
        self._port = port
        self._prefect_port = prefect_port
        self._api_url = f"http://127.0.0.1:{port}/v1"
        self._prefect_url = f"http://127.0.0.1:{prefect_port}/api"
        self._key_file: Path | None = None
        self._login_file = home / LOGIN_FILE
        self._model = _TINY
        self._programs: dict[str, GuardedProcess] = {}
        self._environment = (
            LEAN_SERVER
            | dict(os.environ)
            | {
                "BATCHYARD_HOME": str(home),
                **({CONFIG_VARIABLE: str(path)} if (path := config_file()) else {}),
                "PREFECT_HOME": str(home / "prefect"),
                "PREFECT_API_URL": self._prefect_url,
                "PREFECT_CLI_PROMPT": "false",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": _LEASE_STORAGE,
                "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
                # A path: a browser may reach this server by another port, through a tunnel.
                "PREFECT_SERVER_UI_API_URL": "/api",
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
                "PREFECT_WORKER_QUERY_SECONDS": "1",
            }
        )
        if read_settings().public_url is None:
            # Prefect's pages of batches link to ours.
            self._environment["BATCHYARD_PUBLIC_URL"] = f"http://127.0.0.1:{port}"

    def start(self, show: Callable[[Progress], None]) -> None:
        """Start the server, the API and the workers, in this order; return when they answer."""
        show(Progress("", "Preparing the database"))
        with in_home(read_settings()) as home:
            for name in ("logs", "prefect"):
                (home / name).mkdir(mode=0o700, exist_ok=True)
        # The first to use the database, so that no other process has to create its tables.
        self._key_file = asyncio.run(_key_file())
        login = read_login(login_file(self._home))
        self._environment |= client_environment(login)
        self._start(
            "server",
            *server_command(self._prefect_port, log_level="warning"),
            environment=self._environment | server_environment(self._prefect_port, login),
            umask=PRIVATE_UMASK,
        )
        self._start("api", _BIN / "batchyard", "serve", "--port", str(self._port))
        waiting = partial(self._wait_until_it_answers, show)
        waiting("server", "Starting Prefect's server", f"{self._prefect_url}/health")
        show(Progress("", "Deploying to Prefect"))
        file = self._models_file()
        self._run("batchyard", "deploy", str(file))
        self._model = next((each["model"] for each in _models(file)), _TINY)
        asyncio.run(self._start_reconciler())
        for pool in _pools(file):
            self._start(pool, *PREFECT_WORKER, "--pool", pool)
        waiting("api", "Starting the API", f"{self._api_url}/models")

    def start_text(self) -> str:
        """What to print when everything runs: addresses, the key, and a batch to try."""
        key = self._key_file.read_text().strip() if self._key_file else "YOUR_KEY"
        page = f"http://127.0.0.1:{self._port}"
        page = asyncio.run(_login_link(self._key_file, page)) if self._key_file else f"{page}/login"
        new_link = "batchyard keys login"
        if self._port != DEFAULT_PORT:
            new_link += f" --port {self._port}"
        # Another terminal may be in another folder, where another file or none would be found.
        variables = {"PREFECT_API_URL": self._prefect_url, "BATCHYARD_HOME": str(self._home)}
        if (path := config_file()) is not None:
            variables[CONFIG_VARIABLE] = str(path)
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines = [
            "",
            f"The page:      {page}",
            *([f"A new link:    {new_link}"] if self._key_file else []),
            f"The API:       {self._api_url}",
            f"Its key:       {key if self._key_file else 'from batchyard keys create NAME'}",
            f"Prefect's UI:  http://127.0.0.1:{self._prefect_port}",
            f"Its password:  the line in {self._login_file}",
            f"Logs:          {self._home}/logs",
            *(
                f"{name + ':':<14} {what}"
                for name, what in connections(read_settings()).items()
                if name != "Prefect"  # it is ours, see above
            ),
            "",
            "A batch, from another terminal (more in docs/how-to/use-the-api.md):",
            f"  export OPENAI_BASE_URL={self._api_url} OPENAI_API_KEY={key}",
            _example(self._model),
            "For batchyard's other commands, and Prefect's:",
            f"  export {exports}",
            f'  export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(self._login_file))})"',
            "",
            "Ctrl-C stops everything.",
        ]
        return "\n".join(lines)

    def wait_for_an_end(self) -> NoReturn:
        """Wait until one of the processes ends, and raise a SettingsError that names it."""
        # In a thread: a disk that hangs must not keep Ctrl-C from ending the others.
        threading.Thread(target=self._watch_disk, daemon=True).start()
        while True:
            for name, program in self._programs.items():
                if program.exit_code is not None:
                    raise SettingsError(f"{name} has ended; its log: {self._log(name)}")
                # A full disk ends no process; the log is rotated when there is room.
                with contextlib.suppress(OSError):
                    rotate(self._log(name))
            time.sleep(0.5)

    async def _start_reconciler(self) -> None:
        async with PrefectApi.from_environment(self._environment) as api:
            await start_reconciler(api)

    def _watch_disk(self) -> NoReturn:
        disk = HomeWatch(self._home / "logs")
        while True:
            if news := disk.look():
                say(news)
            time.sleep(_LOOK_SECONDS)

    def stop(self) -> None:
        """Stop first what accepts work, and the server last, because the others use it."""
        for names in (self._programs.keys() - {"server"}, {"server"} & self._programs.keys()):
            running = [self._programs[name] for name in sorted(names)]
            for program in running:
                program.terminate()
            for program in running:
                program.close(_STOP_SECONDS)

    def _models_file(self) -> Path:
        """The operator's file of models, or one of ours with the tiny model."""
        found = config_file()
        if found is not None and "models" in read_config(found):
            return found
        folder = self._home if shipped.CHECKOUT is None else shipped.CHECKOUT
        weights = folder / ("models" if shipped.CHECKOUT is None else ".models") / _TINY
        file = self._home / "up.toml"
        block = _TINY_MODEL_BLOCK.format(name=_TINY, weights=json.dumps(str(weights)))
        file.write_text(_TINY_MODEL + (block if weights.is_dir() else ""))
        return file

    def _start(
        self,
        name: str,
        *command: str | Path,
        environment: dict[str, str] | None = None,
        umask: int = -1,
    ) -> None:
        descriptor = os.open(self._log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "ab") as log:
            self._programs[name] = GuardedProcess(
                command,
                environment=environment or self._environment,
                log=log,
                cwd=shipped.CHECKOUT or self._home,
                umask=umask,
            )

    def _run(self, program: str, *words: str) -> None:
        with tempfile.TemporaryFile() as log:
            command: list[str | Path] = [_BIN / program, *words]
            code = GuardedProcess(
                command, environment=self._environment, log=log, cwd=shipped.CHECKOUT or self._home
            ).join()
            log.seek(0)
            said = log.read().decode(errors="replace")
        if code:
            raise SettingsError(f"{program} {' '.join(words)} failed:\n{said}")

    def _wait_until_it_answers(
        self, show: Callable[[Progress], None], name: str, title: str, url: str
    ) -> None:
        show(Progress("", title))

        def on_wait(words: str) -> None:
            show(Progress("", title, message=words))

        if not asyncio.run(first_answer(self._programs[name], url, on_wait)):
            raise SettingsError(f"{name} did not start; its log: {self._log(name)}")

    def _log(self, name: str) -> Path:
        return self._home / "logs" / f"{name}.log"


def _pools(file: Path) -> list[str]:
    """The pools that `batchyard deploy` has made from the file, each of which needs a worker."""
    named = {model.get("pool", DEFAULT_POOL) for model in _models(file)}
    limits = read_config(file).get("engines_at_once", {})
    return [CONTROL_POOL, *gpu_pools(named | limits.keys())]


def _models(file: Path) -> list[dict[str, Any]]:
    """Its tables ``[[models]]``, which `batchyard deploy` has checked."""
    return list(read_config(file).get("models", []))


def _example(model: str) -> str:
    """A line that makes a batch of one request, from any folder of any machine with curl."""
    body = {"model": model, "messages": [{"role": "user", "content": "Name three colours."}]}
    line = {"custom_id": "1", "method": "POST", "url": _EXAMPLE_ENDPOINT, "body": body}
    batch = {"endpoint": _EXAMPLE_ENDPOINT, "completion_window": "24h", "requests": [line]}
    return (
        '  curl $OPENAI_BASE_URL/batches -H "Authorization: Bearer $OPENAI_API_KEY" '
        f"-d {shlex.quote(json.dumps(batch))}\n"
    )


async def _login_link(key_file: Path, address: str) -> str:
    async with offline_services() as services:
        return await login_link(services, key_file, address)


async def _key_file() -> Path | None:
    async with offline_services() as services:
        return await local_key_file(services)


@contextlib.contextmanager
def _prefect_listening(port: int) -> Iterator[None]:
    """Raises SettingsError where the port is taken."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            yield
    except OSError as error:
        raise SettingsError(
            f"Prefect's server cannot listen on port {port} ({os.strerror(error.errno or 0)}): "
            f"choose another with --prefect-port or {_PREFECT_PORT_VARIABLE}."
        ) from error
