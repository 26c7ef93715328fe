"""A Prefect API of our own, for as long as this process lives, where no other is configured.

Prefect would start one by itself, but in our process group, where the Ctrl-C that is meant for us
ends it as well: the flow run that stops then waits more than a minute for an API that is gone.
And a SIGKILL of ours would leave it behind.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, cast

import aiohttp

from batchyard.engine.guarded_process import GUARDIAN
from batchyard.errors import DispatchFailed

if TYPE_CHECKING:
    from pathlib import Path

_START_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1

# What Prefect itself gives to the API that it starts for one process.
_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


class OwnPrefect:
    """The API's process. Make it before Prefect is imported.

    It is stopped at the exit of this process, after the threads of Prefect's client have sent
    what they still had to send: what was registered first is called last.
    """

    def __init__(self) -> None:
        self._guardian: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._url = ""
        atexit.register(self.stop)

    async def start(self, log_path: Path) -> str:
        """The API's URL, once it answers.

        Raises :class:`~batchyard.errors.DispatchFailed` if it never does.
        """
        if self._guardian is None:
            self._launch(log_path)
        deadline = time.monotonic() + _START_SECONDS
        async with aiohttp.ClientSession(trust_env=False) as session:
            while time.monotonic() < deadline and self._is_running:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{self._url}/health") as response:
                        if response.ok:
                            return self._url
                await asyncio.sleep(_POLL_SECONDS)
        self.stop()
        raise DispatchFailed(f"The Prefect API of this command did not start: see {log_path}")

    @property
    def _is_running(self) -> bool:
        return self._guardian is not None and self._guardian.poll() is None

    def _launch(self, log_path: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._url = f"http://127.0.0.1:{port}/api"
        self._folder = tempfile.mkdtemp(prefix="batchyard-")
        command = [
            *(sys.executable, "-m", "uvicorn", "--factory", "flows.server_plugin:create_app"),
            *("--host", "127.0.0.1", "--port", port, "--log-level", "error", "--lifespan", "on"),
        ]
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", GUARDIAN, str(os.getpid()), self._folder, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log_fd,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,
            )
        finally:
            os.close(log_fd)

    def stop(self) -> None:
        """Stop the API, if it runs; safe to call twice."""
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        orders = cast("IO[bytes]", guardian.stdin)
        with contextlib.suppress(OSError):
            orders.write(b"%.1f\n" % _GRACE_SECONDS)
            orders.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guardian.wait(2 * _GRACE_SECONDS)
        with contextlib.suppress(OSError):
            orders.close()
        shutil.rmtree(self._folder, ignore_errors=True)
