"""Live requests, from the API to the engine and back, beside those of batches.

A small HTTP server in the runner's process. It serves callers that have its secret, which is in the
database for the API, passes bytes, and counts what they used. Nothing here decides who may send
what: the API does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import secrets
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from batchyard.engine.live_answers import (
    FLEX_HEADER,
    HIDE_USAGE_HEADER,
    RETRY_AFTER_SECONDS,
    TENANT_HEADER,
    USAGE_ON_REQUEST,
    AnswerMeter,
)
from batchyard.engine.vllm.private_server import is_healthy, private_folder
from batchyard.errors import EngineLost, StoreError
from batchyard.lines.endpoints import LIVE
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.runner.live.live_counts import LiveCounts, Outcome
from batchyard.runner.live.live_share import LiveShare
from batchyard.services.patience import patiently
from batchyard.store import LiveEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator

    from batchyard.engine.base import (
        Abort,
        Engine,
        EngineAnswer,
        EngineRequest,
        Gate,
        LivePromise,
        LiveServer,
    )
    from batchyard.engine.sharing.gate import Streaming
    from batchyard.runner.window.other_traffic import Quiet
    from batchyard.services.services import Services
    from batchyard.store import LiveUse
    from batchyard.wire import TokenUsage

log = event_logger(__name__)

PASSED_HEADERS: Final = ("content-type", "x-request-id")
"""Headers of a request that the engine gets too."""
_ANSWERED_HEADERS: Final = ("content-type", "retry-after")
_ROOM_BYTES: Final = 1024**2
"""What the API adds to a body: a salt, options of the stream."""
_EVENTS: Final = "text/event-stream"
_COUNT_SECONDS: Final = 5.0
_END_SECONDS: Final = 1.0
"""How long the server, as it ends, waits for requests before it cancels them, and after."""
_AFTERMATH_SECONDS: Final = 10.0
_HEALTH_SECONDS: Final = 5.0
_READ_BYTES: Final = 1 << 18
_FLEX_SECONDS: Final = 300.0
"""How long a request that may wait does so at most: half of the time that OpenAI's SDKs have."""
_FLEX_LOOK_SECONDS: Final = 0.25


class _ApiLeft(Exception):
    """The API, or the client behind it, reads no more."""


@contextlib.contextmanager
def _leaving_noticed() -> Iterator[None]:
    """Around what is written to the API: aiohttp has the same error for what is read elsewhere."""
    try:
        yield
    except ConnectionError as error:
        raise _ApiLeft from error


def live_requests(
    services: Services, engine: Engine, runner_id: str, on_answer: Callable[[TokenUsage], None]
) -> LiveRequests | None:
    """The server of a runner whose engine takes live requests; None: it does not."""
    live = engine.live_server
    if live is None:
        return None
    return LiveRequests(services, engine, live.promise, runner_id, on_answer)


async def opened(live: LiveRequests, stack: contextlib.AsyncExitStack) -> LiveRequests | None:
    """None if this machine cannot take live requests: batches need only the engine."""
    try:
        return await stack.enter_async_context(live)
    except OSError as error:
        log.error("live.not_open", str(error), model=live.model, runner=live.runner_id)
        return None


class LiveRequests:
    """The server of one runner. Use as an async context manager, while its engine runs.

    The engine may be lost and start again meanwhile. ``on_answer`` gets the tokens of each request
    that the engine has answered. Entering it raises OSError if it cannot listen.
    """

    def __init__(
        self,
        services: Services,
        engine: Engine,
        promise: LivePromise,
        runner_id: str,
        on_answer: Callable[[TokenUsage], None],
    ) -> None:
        self._services = services
        self.model = engine.model
        self.runner_id = runner_id
        self._engine = engine
        self._on_answer = on_answer
        self._secret = secrets.token_urlsafe(32)
        self._most = 2 * engine.max_num_seqs
        self._is_draining = False
        self._is_closing = asyncio.Event()
        self._window: Quiet | None = None
        self._share = LiveShare(engine, promise)
        self.counts = LiveCounts()
        self._uncounted: tuple[list[LiveUse], str] | None = None
        """What was taken from the counts and may not be in the database yet; its write's name."""
        self.last_at = -math.inf
        """When the last one left, by the monotonic clock."""
        self._stack: contextlib.AsyncExitStack

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            counting = asyncio.create_task(self._keep_counting(), name="live usage")
            # After the server has ended: what it breaks off is counted, too.
            stack.push_async_callback(self._stop_counting, counting)
            address = await self._listen(stack)
            engine = LiveEngine(
                runner_id=self.runner_id, model=self.model, address=address, secret=self._secret
            )
            register = partial(self._services.store.live_engines.register, engine)
            # Its model may have loaded for minutes, which a short outage must not cost.
            await patiently(register, "a live engine")
            stack.push_async_callback(self._withdraw)
            self._stack = stack.pop_all()
        log.info("live.open", model=self.model, address=address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def in_flight(self) -> int:
        """Live requests that are here now."""
        return self._share.in_flight + self._share.flex

    def join(self, window: Quiet) -> Gate:
        """What each request of a batch waits for from now on."""
        self._window = window
        return self._share.gate

    def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], answers_of: Streaming
    ) -> AsyncGenerator[EngineAnswer, None]:
        """What ``answers_of`` makes of requests of batches, which are counted meanwhile."""
        return self._share.gate.stream(requests, answers_of)

    def is_here(self) -> bool:
        """Whether the engine has live requests now."""
        return self.in_flight > 0

    def was_here(self, since: float) -> bool:
        """Whether it has, or had some a moment ago: a crash comes after its cause."""
        return self.is_here() or self.last_at > max(since, time.monotonic() - _AFTERMATH_SECONDS)

    def drain(self) -> None:
        """Take no more; what is in flight goes on."""
        self._is_draining = True

    # -- the server -------------------------------------------------------------------------

    async def _listen(self, stack: contextlib.AsyncExitStack) -> str:
        """Listen until the stack is closed; the address for the API."""
        limits = self._services.settings.limits
        app = web.Application(client_max_size=limits.max_line_bytes + _ROOM_BYTES)
        app.router.add_post("/{path:.*}", self._serve)
        # A request whose client is gone ends in the engine too.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_END_SECONDS
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        host = self._services.settings.live_host
        if host is None:
            folder = private_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            path = folder / "live.sock"
            await web.UnixSite(runner, str(path)).start()
            path.chmod(0o600)
            return f"unix://{path}"
        port = await self._listen_on_port(runner)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _listen_on_port(self, runner: web.AppRunner) -> int:
        settings = self._services.settings
        first, slots = settings.live_port, max(1, len(settings.engine_slots))
        last_error: OSError | None = None
        every = "::" if ":" in (settings.live_host or "") else "0.0.0.0"  # noqa: S104 - it is asked for
        for port in range(first, first + slots) if first else (0,):
            try:
                await web.TCPSite(runner, every, port).start()
            except OSError as error:
                last_error = error
                continue
            return int(runner.addresses[0][1])
        raise OSError(
            f"No port of BATCHYARD_LIVE_PORT is free on {settings.this_machine}, from {first} on, "
            f"one for each engine slot: {last_error}"
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        # As it came: whoever finds the address may send any bytes.
        given = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._secret}".encode()):
            return web.Response(status=401)
        if request.path not in LIVE:
            return web.Response(status=404)
        if self._engine.live_server is None or not self._has_room:
            return _not_taken()
        if FLEX_HEADER in request.headers:
            return await self._serve_patient(request)
        self._share.came()
        try:
            return await self._pass_on(request)
        finally:
            self.last_at = time.monotonic()
            self._share.left()

    async def _serve_patient(self, request: web.Request) -> web.StreamResponse:
        """Serve a request that waits until the engine has a seat to spare."""
        share, seconds = self._share, self._services.settings.request_timeout_seconds
        until = time.monotonic() + min(_FLEX_SECONDS, seconds / 2)
        while not share.has_seat_to_spare:
            if time.monotonic() >= until:
                return _no_seat()
            await asyncio.sleep(_FLEX_LOOK_SECONDS)
            if not self._has_room:
                return _not_taken()
        share.flex += 1
        try:
            return await self._pass_on(request)
        finally:
            self.last_at = time.monotonic()
            share.flex -= 1

    @property
    def _has_room(self) -> bool:
        needs_quiet = self._window is not None and self._window.needs_quiet
        return not (self._is_draining or needs_quiet) and self.in_flight < self._most

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        # Not before: the engine may have started again while the request waited.
        if (server := self._engine.live_server) is None:
            return _not_taken()
        began_at = time.monotonic()
        meter = AnswerMeter(
            request_bytes=len(body),
            hide_usage=HIDE_USAGE_HEADER in request.headers,
            # The engine itself says it of a response.
            says_flex=FLEX_HEADER in request.headers and request.path in USAGE_ON_REQUEST,
        )
        outcome: Outcome | None = Outcome.LEFT
        is_alive = False
        response: web.StreamResponse | None = None
        try:
            async with self._ask(request, server, body) as answer:
                response = web.StreamResponse(status=answer.status, headers=_headers_of(answer))
                meter.begin(is_stream=answer.content_type == _EVENTS)
                await self._stream(request, answer, response, meter, began_at)
                outcome = Outcome.COMPLETED if answer.status < 400 else Outcome.FAILED
                is_alive = answer.status < 500
                return response
        except _ApiLeft as error:
            # aiohttp takes this for a client that is gone, and is silent.
            raise ConnectionResetError from error
        except aiohttp.ClientConnectorError:
            # It is starting again, for minutes perhaps, and has not seen the request.
            outcome = None
            return _not_taken()
        except (aiohttp.ClientError, EngineLost, OSError, ValueError) as error:
            # A time-out is an OSError too.
            outcome = Outcome.LOST
            log.warning("live.lost", describe(error), model=self.model)
            if response is None or not response.prepared:
                return web.Response(status=504 if isinstance(error, TimeoutError) else 502)
            # The API must see that something is missing.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError from error
        finally:
            if outcome is not None:
                tenant = unquote(request.headers.get(TENANT_HEADER, ""))
                used = self.counts.ended(tenant, self.model, request.path, outcome, meter)
                if is_alive:
                    self._on_answer(used)

    @contextlib.asynccontextmanager
    async def _ask(
        self, request: web.Request, server: LiveServer, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout_seconds = self._services.settings.request_timeout_seconds
        passed = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
        async with (
            _session(server, timeout_seconds) as session,
            session.post(
                f"http://engine{request.path_qs}",
                data=body,
                headers={**passed, "accept-encoding": "identity", **server.headers},
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status >= 500 and not await _is_well(server):
                # So a dying engine answers all that is in it.
                raise EngineLost("The engine has crashed.")
            yield answer

    async def _stream(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        response: web.StreamResponse,
        meter: AnswerMeter,
        began_at: float,
    ) -> None:
        with _leaving_noticed():
            await response.prepare(request)
        is_stream, last_at = answer.content_type == _EVENTS, None
        async for data in answer.content.iter_any():
            passed = meter.feed(data)
            if passed:
                if is_stream:
                    is_promised = FLEX_HEADER not in request.headers
                    last_at = self._note_bytes(began_at, last_at, is_promised=is_promised)
                # Waits while the client does not read, and so does the engine's server.
                with _leaving_noticed():
                    await response.write(passed)
        with _leaving_noticed():
            if rest := meter.rest():
                await response.write(rest)
            await response.write_eof()

    def _note_bytes(self, began_at: float, last_at: float | None, *, is_promised: bool) -> float:
        """Note how long a stream took to begin, or to go on; the moment of now.

        ``is_promised``: an objective is for it too.
        """
        now = time.monotonic()
        if last_at is None:
            self.counts.first_bytes(now - began_at)
            if is_promised:
                self._share.first_bytes(now - began_at)
        elif is_promised:
            self._share.next_bytes(now - last_at)
        return now

    # -- what it counts ---------------------------------------------------------------------

    async def _keep_counting(self) -> None:
        while not self._is_closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COUNT_SECONDS):
                    await self._is_closing.wait()
            try:
                await self._count()
            except Exception as error:  # noqa: BLE001 - the next time may go better
                log.warning("live.not_counted", describe(error), model=self.model)

    async def _count(self) -> None:
        while True:
            if self._uncounted is None and (uses := self.counts.take()):
                self._uncounted = uses, secrets.token_hex(8)
            if self._uncounted is None:
                return
            uses, name = self._uncounted
            # After an error they are sent as they are and under the same name: they may have been
            # counted, if only the reply was lost.
            await self._services.store.usage.count_live(uses, writer=self.runner_id, name=name)
            self._uncounted = None

    async def _stop_counting(self, counting: asyncio.Task[None]) -> None:
        # Not cancelled: it would be unknown whether it has written what it was about to write.
        self._is_closing.set()
        await asyncio.wait([counting])

    async def _withdraw(self) -> None:
        try:
            await self._services.store.live_engines.withdraw(self.runner_id)
        except StoreError as error:
            # It ends with the runner's heartbeat.
            log.warning("live.not_withdrawn", error, model=self.model)


def _session(server: LiveServer, timeout_seconds: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # A kept connection might be one that the engine has closed.
        connector=aiohttp.UnixConnector(str(server.socket), force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        read_bufsize=_READ_BYTES,
        trust_env=False,
    )


async def _is_well(server: LiveServer) -> bool:
    async with _session(server, _HEALTH_SECONDS) as session:
        return await is_healthy(session)


def _not_taken() -> web.Response:
    """The API offers the request to the model's next engine."""
    return web.Response(status=503, headers={"retry-after": str(RETRY_AFTER_SECONDS)})


def _no_seat() -> web.Response:
    """As OpenAI answers a flex request for which it has no capacity; its SDKs ask again."""
    error = {
        "message": "The engine has no place to spare for a request of the flex tier: ask again "
        "later, or without 'service_tier'.",
        "type": "requests",
        "code": "resource_unavailable",
    }
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return web.json_response({"error": error}, status=429, headers=headers)


def _headers_of(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _ANSWERED_HEADERS if name in answer.headers}
