"""A node's side: it joins its leader, runs vLLM while the leader wants it to, and joins again."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchyard.engine.middleware import line_stream
from batchyard.engine.vllm.engine_log import cause_of_loss
from batchyard.engine.vllm.nodes.link import MAX_LINE_BYTES, Link, LinkLost, link_keys, linked
from batchyard.engine.vllm.nodes.orders import HOST_VARIABLE, order_in
from batchyard.engine.vllm.private_server import private_folder
from batchyard.engine.vllm.vllm import SERVERS_SCRIPT, STOP_GRACE_SECONDS
from batchyard.engine.vllm.vllm_options import (
    EngineOptions,
    detect_profile,
    engine_environment,
    is_batch_invariant,
    is_missing_path,
    suited_to,
)
from batchyard.engine.vllm.vllm_version import vllm_version
from batchyard.logs.rotation import rotate
from batchyard.processes.beside import beside
from batchyard.processes.guarded_process import GuardedProcess
from batchyard.processes.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchyard.engine.vllm.nodes.orders import Order
    from batchyard.engine.vllm.vllm_options import DeviceProfile

_CONNECT_SECONDS: Final = 10.0
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
"""A leader that starts its engine again waits for us."""


class Node:
    """One machine of an engine that is led from ``leader``, a name or an address.

    ``python`` is this machine's engine environment; ``log_path`` gets vLLM's output; ``say`` tells
    people what happens. Raises ``ValueError`` for keys of the wrong form.
    """

    def __init__(
        self,
        leader: str,
        port: int,
        *,
        secret_keys: Sequence[str],
        python: Path,
        log_path: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._leader = leader
        self._port = port
        self._keys = link_keys(secret_keys)
        self._python = python
        self._log_path = log_path
        self._say = say
        self._said = ""

    async def run(self, *, once: bool = False) -> None:
        """Join the leader, again and again until cancelled; ``once``: until it was left once.

        On a cancellation vLLM is ended first. Raises
        :class:`~batchyard.errors.EngineStartFailed` where there is no vLLM that works.
        """
        version = vllm_version(self._python, os.environ)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._join({"name": socket.gethostname(), "vllm": version})
                if once:
                    return
                pause = _FIRST_PAUSE_SECONDS
            except (LinkLost, OSError, TimeoutError) as error:
                self._tell(f"waiting for the leader {self._leader}:{self._port} ({_why(error)})")
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause)

    async def _join(self, hello: dict[str, Any]) -> None:
        """One life of the engine. Raises LinkLost or OSError if it has not begun."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                self._leader, self._port, limit=MAX_LINE_BYTES
            )
        async with linked(reader, writer, self._keys) as link:
            link.send(hello)
            self._tell(f"connected to the leader {self._leader}:{self._port}")
            order = order_in(await link.receive())
            folder = private_folder()
            try:
                self._tell(await self._run(order, link, folder))
            except OSError as error:
                self._tell(f"cannot run vLLM: {_why(error)}")
                link.send({"cannot": _why(error)})
                await link.sent()
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, order: Order, link: Link, folder: Path) -> str:
        """Run vLLM until it or the leader has ended; says which. Raises ``OSError``."""
        own = os.environ | dict(order.environment)
        # Its tool may take longer than a leader waits for a sign of life.
        profile = await in_thread(detect_profile, own)
        profile = suited_to(profile, batch_invariant=is_batch_invariant(own))
        process, log_start = self._launch(order, profile, link.own_address, folder)
        self._tell(f"running vLLM; its log: {self._log_path}")
        try:
            async with beside(_end_of(link)) as leaving, beside(process.wait()) as ending:
                await asyncio.wait((leaving, ending), return_when=asyncio.FIRST_COMPLETED)
                if not ending.done():
                    return f"the leader has ended the engine ({leaving.result()})"
                code = ending.result()
                lines = cause_of_loss(self._log_path, log_start)
                link.send({"ended": code, "log": lines})
                await link.sent()
                return f"vLLM ended with exit code {code}"
        finally:
            await process.stop(STOP_GRACE_SECONDS)

    def _launch(
        self, order: Order, profile: DeviceProfile, address: str, folder: Path
    ) -> tuple[GuardedProcess, int]:
        if is_missing_path(order.weights):
            raise FileNotFoundError(errno.ENOENT, f"it has no {order.weights}")
        environment = engine_environment(
            os.environ,
            {"VLLM_RPC_BASE_PATH": str(folder), HOST_VARIABLE: address, **order.environment},
            weights=order.weights,
            options=EngineOptions(order.words),
            profile=profile,
            python_path=Path(line_stream.__file__).parent,
            needs_hub=order.needs_hub,
        )
        rotate(self._log_path)
        with self._log_path.open("ab") as output:
            start = os.fstat(output.fileno()).st_size
            command: list[str | Path] = [self._python, SERVERS_SCRIPT, *order.words]
            process = GuardedProcess(command, environment=environment, log=output, scratch=folder)
        return process, start

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


async def _end_of(link: Link) -> str:
    """How the connection to the leader has ended, when it has."""
    try:
        await link.receive()
    except LinkLost as error:
        return str(error)
    return "it sent another message"


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionError) and error.errno:
        # asyncio's own text has the address once more.
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return f"no answer in {_CONNECT_SECONDS:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
