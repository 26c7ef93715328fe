"""The engine that we start and own: stock ``vllm serve`` on a private Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.base import LivePromise, LiveServer, StartProgress
from batchyard.engine.kinds.vllm import GAUGES
from batchyard.engine.middleware import line_stream
from batchyard.engine.prompt_counting.counter import CounterProgram, counter_program
from batchyard.engine.routes import post_routes
from batchyard.engine.vllm.engine_log import (
    MAX_CAUSE_LINES,
    LogTail,
    cause_of,
    cause_of_loss,
    progress_of,
)
from batchyard.engine.vllm.line_client import stream_lines
from batchyard.engine.vllm.lora import are_here, lora_options, module_names
from batchyard.engine.vllm.nodes.leader import Nodes
from batchyard.engine.vllm.nodes.orders import Order
from batchyard.engine.vllm.private_server import (
    BASE_URL,
    SOCKET_NAME,
    is_healthy,
    private_folder,
)
from batchyard.engine.vllm.several_servers import stream_over
from batchyard.engine.vllm.vllm_options import (
    DeviceProfile,
    EngineOptions,
    added_options,
    api_servers,
    detect_profile,
    engine_environment,
    is_batch_invariant,
    suited_to,
)
from batchyard.engine.vllm.vllm_version import vllm_version
from batchyard.errors import EngineLost, EngineStartFailed, SettingsError
from batchyard.logs import event_logger
from batchyard.logs.rotation import rotate
from batchyard.processes.guarded_process import GuardedProcess

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence

    from batchyard.engine.base import Abort, EngineAnswer, EngineRequest, Occupancy
    from batchyard.lines.body_fields import Routes

log = event_logger(__name__)

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The one server process that ``vllm serve`` runs, from vLLM 0.32 on."""
SERVERS_SCRIPT = Path(__file__).with_name("serve_script.py")
"""What starts several of them."""
MIDDLEWARE = ("direct_routes.DirectRoutes", "line_stream.LineStream")
"""The last one is the outermost."""
READ_BUFFER_BYTES = 1 << 20
REMEMBERED_LOG_LINES = 2000
POLL_SECONDS = 0.25
REPLY_SECONDS = 30.0
"""For what the server answers without the engine's help."""
STOP_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Running:
    """One life of the engine."""

    process: GuardedProcess
    folder: Path
    """Only we may look into it: the sockets, and the log where none was given."""
    log_path: Path
    log_start: int
    """Where its part of the log begins."""

    @property
    def socket_path(self) -> Path:
        return self.folder / SOCKET_NAME


class VllmEngine:
    """A ``vllm serve`` process (and all that it starts), driven through the line stream.

    ``model`` is the name that request bodies carry; ``weights`` the path or hub id to load where
    that differs. ``options`` go to ``vllm serve`` unchanged; ours are only added where they leave
    something open. ``python`` is the engine environment's interpreter, ``environment`` goes on
    top of what the engine inherits. ``log_path`` is appended to and kept; without one the log
    lives in a temporary folder that is kept only if the start fails. ``media_domains`` are the
    only hosts from which it may fetch media that requests name by URL, without redirects; None:
    whatever vLLM fetches by itself. ``live``: it takes live requests beside those of batches,
    whose users have ``promise``.
    ``adapters``: the folder or hub id of each LoRA adapter, by the name that bodies carry.
    ``nodes``: the other machines that it runs on.

    It can be started again after :class:`~batchyard.errors.EngineLost`.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str] = (),
        *,
        python: Path,
        weights: str | None = None,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        profile: DeviceProfile | None = None,
        media_domains: Sequence[str] | None = None,
        live: bool = False,
        promise: LivePromise | None = None,
        adapters: Mapping[str, str] | None = None,
        nodes: Nodes | None = None,
        start_timeout_seconds: float = 1800.0,
    ) -> None:
        self.model = model
        self._weights = weights or model
        self._options = EngineOptions(options)
        self._python = python
        self._own_environment = dict(environment or {})
        self._log_path = log_path
        self._profile = profile
        self._media_domains = media_domains
        self.is_live = live
        self.promise = promise or LivePromise()
        self._api_servers = api_servers(
            self._options, os.environ | self._own_environment, len(os.sched_getaffinity(0))
        )
        self.is_batch_invariant = is_batch_invariant(os.environ | self._own_environment)
        self._adapters = dict(adapters or {})
        self.adapters = frozenset([*self._adapters, *module_names(options)])
        self._nodes = nodes or Nodes()
        self._start_timeout_seconds = start_timeout_seconds
        self._running: _Running | None = None
        self._routes: Routes | None = None
        self._routes_of: _Running | None = None
        """The life of the engine that was asked for its routes."""

    @property
    def max_num_seqs(self) -> int:
        """The operator's ``--max-num-seqs`` or the device's, times the data-parallel ranks."""
        own = self._options.number("max-num-seqs") or self._device().max_num_seqs
        return own * (self._options.number("data-parallel-size") or 1)

    @property
    def window_size(self) -> int:
        """Twice what it runs at once: its next step is always full, a crash loses little."""
        return 2 * self.max_num_seqs

    @property
    def gate(self) -> None:
        """None: it is ours."""
        return None

    @property
    def metrics_socket(self) -> Path | None:
        """The engine's private socket, while it runs."""
        return None if self._running is None else self._running.socket_path

    @property
    def live_server(self) -> LiveServer | None:
        """Its private socket, if it is live and runs."""
        if not self.is_live or self._running is None:
            return None
        return LiveServer(self._running.socket_path, self._headers(), self.promise)

    @property
    def prompt_counter(self) -> CounterProgram:
        """A process of the same environment that loads the tokenizer only."""
        return counter_program(self._python, self._weights, self._options, self._own_environment)

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Start the engine and return once it answers.

        Raises :class:`~batchyard.errors.EngineStartFailed`, with the end of the engine's log, or
        where there is no vLLM that works.
        """
        await self.stop()
        # A cancellation does not wait for it: it holds nothing, and nvidia-smi may hang.
        version = await asyncio.to_thread(self._look_around)  # noqa: TID251 - see above
        on_progress = on_progress or (lambda _: None)
        try:
            await self._nodes.gather(version, self._start_timeout_seconds, on_progress)
            running, tail = self._launch()
        except BaseException as error:
            await self._nodes.close()
            if not isinstance(error, OSError | SettingsError):
                raise
            raise EngineStartFailed(
                f"cannot start the engine for model {self.model!r}: {error}"
            ) from error
        self._running = running
        try:
            await self._wait_until_ready(running, tail, on_progress)
        except BaseException:
            # On any exception, cancellation included, stop the process: nothing else would.
            self._running = None
            running.process.kill()
            if running.log_path.parent == running.folder:
                running.socket_path.unlink(missing_ok=True)
            else:
                shutil.rmtree(running.folder, ignore_errors=True)
            await self._nodes.close()
            raise
        log.info("engine.ready", model=self.model, log=running.log_path)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after ten seconds; returns when every process is gone."""
        running, self._running = self._running, None
        self._nodes.leave()
        if running is None:
            return
        try:
            await running.process.stop(STOP_GRACE_SECONDS)
        finally:
            shutil.rmtree(running.folder, ignore_errors=True)
            await self._nodes.close()
        log.info("engine.stopped", model=self.model, exit=running.process.exit_code)

    async def routes(self) -> Routes | None:
        """Those of the engine's OpenAPI description, unless it is switched off."""
        running = self._running
        if running is None or self._routes_of is not running:
            # Once: the description is long, and its routes stay as they are.
            self._routes = post_routes(await self._get("/openapi.json"))
            self._routes_of = running
        return self._routes

    async def work_done(self) -> float | None:
        """From the engine's metrics; None with ``--disable-log-stats``, which ends them."""
        return GAUGES.work_done(await self.metrics())

    async def occupancy(self) -> Occupancy | None:
        """From the engine's metrics; None with ``--disable-log-stats``, which ends them."""
        return GAUGES.occupancy(await self.metrics())

    async def metrics(self) -> str:
        """The engine's own metrics, in Prometheus' text format."""
        return (await self._get("/metrics")).decode(errors="replace")

    async def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
    ) -> AsyncGenerator[EngineAnswer, None]:
        """See :meth:`batchyard.engine.base.Engine.stream`."""
        async with self._session() as session:
            open_stream = partial(
                stream_lines,
                session,
                BASE_URL,
                timeout_seconds=timeout_seconds,
                headers=self._headers(),
            )
            if self._api_servers == 1:
                answers = open_stream(requests)
            else:
                answers = stream_over(open_stream, self._api_servers, requests)
            try:
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        yield answer
            except EngineLost as error:
                raise await self._lost(error) from error

    def _headers(self) -> dict[str, str]:
        key = self._options.value("api-key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _get(self, path: str) -> bytes:
        try:
            async with (
                self._session(timeout_seconds=REPLY_SECONDS) as session,
                session.get(BASE_URL + path) as response,
            ):
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise await self._lost(error) from error

    def _look_around(self) -> str | None:
        """Check whether this vLLM will do; its version, if it says that."""
        version = vllm_version(self._python, self._environment(Path("/")))
        log.info("engine.starting", model=self.model, vllm=version or "unknown")
        return version

    def _device(self) -> DeviceProfile:
        if self._profile is None:
            self._profile = detect_profile(os.environ | self._own_environment)
        return suited_to(self._profile, batch_invariant=self.is_batch_invariant)

    def _launch(self) -> tuple[_Running, LogTail]:
        folder = private_folder()
        try:
            return self._launch_in(folder)
        except BaseException:
            # It has no process that would remove it.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _launch_in(self, folder: Path) -> tuple[_Running, LogTail]:
        log_path = self._log_path or folder / "engine.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            rotate(log_path)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            log_start = os.fstat(log_fd).st_size
            tail = LogTail(log_path, start=log_start)
            command, environment = self._command(folder / SOCKET_NAME), self._environment(folder)
            process = GuardedProcess(command, environment=environment, log=log_fd, scratch=folder)
            self._nodes.lead(self._order(), process.kill)
        finally:
            os.close(log_fd)
        return _Running(process, folder, log_path, log_start), tail

    def _order(self) -> Order:
        """What all machines of the engine have in common."""
        words = (
            *self._options.words,
            *lora_options(self._adapters, self._options, on_cpu=self._device().is_cpu),
            *added_options(
                self.model,
                self._weights,
                self._options,
                self._device(),
                self._media_domains,
                live=self.is_live,
            ),
        )
        return Order(self._weights, words, self._own_environment, self._needs_hub)

    def _command(self, socket_path: Path) -> list[str]:
        words = [
            *self._order().words,
            *self._nodes.words,
            *("--uds", str(socket_path)),
            *(word for name in MIDDLEWARE for word in ("--middleware", name)),
        ]
        if self._api_servers == 1:
            return [str(self._python), "-m", SERVER_MODULE, *words]
        if "api-server-count" not in self._options:
            words += ["--api-server-count", str(self._api_servers)]
        return [str(self._python), str(SERVERS_SCRIPT), *words]

    @property
    def _needs_hub(self) -> bool:
        return not are_here(self._adapters.values())

    def _environment(self, folder: Path) -> dict[str, str]:
        # The engine's processes speak (pickle) over sockets; theirs belong where only we look.
        own = {
            "VLLM_RPC_BASE_PATH": str(folder),
            **self._nodes.environment,
            **self._own_environment,
        }
        if self._api_servers > 1:
            # vLLM sets it itself, but too late for servers that are copies of its first process
            # (`infra/engine`): they would have no metrics.
            own["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        return engine_environment(
            os.environ,
            own,
            weights=self._weights,
            options=self._options,
            needs_hub=self._needs_hub,
            profile=self._device(),
            python_path=Path(line_stream.__file__).parent,
            follows_media_redirects=self._media_domains is None,
            live=self.is_live,
        )

    async def _wait_until_ready(
        self, running: _Running, tail: LogTail, on_progress: Callable[[StartProgress], None]
    ) -> None:
        deadline = time.monotonic() + self._start_timeout_seconds
        seen: deque[str] = deque(maxlen=REMEMBERED_LOG_LINES)
        on_progress(last := StartProgress("starting vLLM"))
        async with self._session(timeout_seconds=REPLY_SECONDS) as session:
            while running.process.exit_code is None:
                seen.extend(lines := tail.new_lines())
                for progress in filter(None, map(progress_of, lines)):
                    if progress != last:
                        on_progress(last := progress)
                if await is_healthy(session):
                    running.socket_path.chmod(0o600)
                    on_progress(StartProgress("ready", 1.0))
                    return
                if time.monotonic() > deadline:
                    seen.extend(tail.rest())
                    how = f"was not ready after {self._start_timeout_seconds:.0f} s"
                    raise self._start_failure(running, how, list(seen)[-MAX_CAUSE_LINES:])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await running.process.wait()
        seen.extend(tail.rest())
        if (loss := self._nodes.loss) is not None:
            raise self._start_failure(running, f"was ended: {loss.reason}", loss.log)
        how = f"ended with exit code {running.process.exit_code}"
        raise self._start_failure(running, how, cause_of(seen))

    def _start_failure(self, running: _Running, how: str, lines: list[str]) -> EngineStartFailed:
        text = "\n".join(f"    {line}" for line in lines)
        return EngineStartFailed(
            f"the engine for model {self.model!r} {how}; from its log {running.log_path}:\n{text}"
        )

    def _session(self, *, timeout_seconds: float | None = None) -> aiohttp.ClientSession:
        if self._running is None:
            raise EngineLost(f"the engine for model {self.model!r} is not running")
        return aiohttp.ClientSession(
            # A kept connection might be one that the engine has closed: one for each exchange.
            connector=aiohttp.UnixConnector(str(self._running.socket_path), force_close=True),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            read_bufsize=READ_BUFFER_BYTES,
            trust_env=False,
        )

    async def _lost(self, error: Exception) -> EngineLost:
        """The same loss with the engine's exit code, if it ends at once."""
        running = self._running
        if running is None:
            return EngineLost(f"the engine for model {self.model!r} was stopped")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await running.process.wait()
        code = running.process.exit_code
        how = "" if code is None else f"; it ended with exit code {code}"
        kind = EngineLost
        if (loss := self._nodes.loss) is not None:
            how, kind = f"; {loss.reason}", loss.error
        with contextlib.suppress(OSError):
            # The log is on this machine, and in a pod it goes with the pod.
            for line in cause_of_loss(running.log_path, running.log_start):
                log.warning("engine.log", line, model=self.model)
        return kind(
            f"lost the engine for model {self.model!r}: {error}{how}; its log: {running.log_path}"
        )
