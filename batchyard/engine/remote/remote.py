"""A remote engine: any OpenAI-compatible server, one POST per request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.base import EngineAnswer, NoAnswer, StartProgress, http_answer
from batchyard.engine.kinds import unknown
from batchyard.engine.kinds.kind import Usage
from batchyard.engine.kinds.recognition import recognise, seats_of
from batchyard.engine.middleware.cache_salt import FIELD, spliced, with_member
from batchyard.engine.remote import seats, server_client
from batchyard.engine.remote.fan_out import answer_concurrently
from batchyard.engine.remote.server_address import MODELS, possible_addresses
from batchyard.engine.remote.server_client import (
    ANSWER_TOO_LONG,
    LOOK_TIMEOUT_SECONDS,
    location_of,
    look_at,
    open_session,
    read_up_to,
    usable_key,
)
from batchyard.engine.remote.server_search import (
    check_look,
    find_server,
    listed_models,
)
from batchyard.engine.remote.unstreamed import unstreamed
from batchyard.engine.routes import routes_with_field
from batchyard.engine.sharing.controller import ShareController
from batchyard.engine.sharing.gate import ShareGate
from batchyard.engine.sharing.metrics_look import MetricsLook
from batchyard.engine.sharing.request_size import expected_tokens
from batchyard.errors import (
    EngineLost,
    EngineNotReached,
    EngineNotReady,
    EngineStartFailed,
    SettingsError,
)
from batchyard.logs import event_logger
from batchyard.results.results import REQUEST_ID_PREFIX
from batchyard.web.retry_after import retry_after_seconds

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable

    from batchyard.engine.base import Abort, EngineRequest, Occupancy
    from batchyard.engine.kinds.kind import ServerKind
    from batchyard.engine.objective import Objective
    from batchyard.engine.remote.server_address import ServerAddress
    from batchyard.engine.remote.server_client import Look
    from batchyard.engine.sharing.server_load import ServerLoad
    from batchyard.lines.body_fields import Routes

log = event_logger(__name__)


class RemoteEngine:
    """A server reached by URL; ``start`` looks whether it is there, ``stop`` only lets go.

    ``base_url`` is ``http://``, ``https://`` or ``unix:///path.sock``, with or without the
    ``/v1`` that request URLs begin with, or a path such as ``/api/v3`` that takes its place:
    :meth:`start` finds out. ``max_num_seqs`` is how much the server runs at once;
    None: it is asked. Unless we have it to ourselves (``exclusive``), a batch takes only a share of
    that, which :mod:`batchyard.engine.sharing` finds: by ``objective`` if there is one, and with
    ``reserve_seats`` always left free. ``priority`` becomes a member of each JSON body: a vLLM
    without ``--scheduling-policy priority`` ignores it. ``takes_cache_salt`` None: by
    the server's own ``/openapi.json``. ``adapters`` are the names of those that it has for the
    model. A request whose connection breaks is answered
    ``CONNECTION_LOST``; a server that cannot be connected to is
    :class:`~batchyard.errors.EngineNotReached`.

    Raises :class:`~batchyard.errors.SettingsError` for a URL that is none of these, a key that no
    header can carry, and for users to be considered on a server that has none.
    """

    is_batch_invariant = False
    """No server says it."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        max_num_seqs: int | None = None,
        exclusive: bool = False,
        objective: Objective | None = None,
        reserve_seats: int | None = None,
        priority: int | None = None,
        takes_cache_salt: bool | None = None,
        adapters: Iterable[str] = (),
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.model = model
        self.adapters = frozenset(adapters)
        self._given_seats = max_num_seqs
        self._seats = max_num_seqs or (seats.UNKNOWN_EXCLUSIVE if exclusive else seats.UNKNOWN)
        self._exclusive = exclusive
        self._priority = priority
        self._takes_cache_salt = takes_cache_salt
        self._salted_urls: asyncio.Task[frozenset[str]] | None = None
        self._warned: set[str] = set()
        self._was_listed = False
        self._has_answered = False
        """Well, so that it has the model although it may not list it."""
        self._addresses = possible_addresses(base_url)
        """Only one, as soon as the server has been found."""
        self._is_found = False
        self.kind: ServerKind = unknown.KIND
        """What the server is, once it has been found."""
        self._api_key = usable_key(api_key)
        self._ssl_context = ssl_context
        self._session: aiohttp.ClientSession | None = None
        if exclusive and (objective is not None or reserve_seats is not None):
            raise SettingsError(
                "an exclusive server has no other users: leave out their latencies and seats, or "
                "exclusive"
            )
        if max_num_seqs is not None and (reserve_seats or 0) >= max_num_seqs:
            raise SettingsError(f"of {max_num_seqs} seats fewer than {reserve_seats} can be kept")
        self._gate = None if exclusive else self._new_gate(objective, reserve_seats)

    def __repr__(self) -> str:
        return f"RemoteEngine({self._where!r}, {self.model!r})"

    @property
    def max_num_seqs(self) -> int:
        """See :meth:`batchyard.engine.base.Engine.max_num_seqs`. Known after :meth:`start`.

        Where it is found by trying, what has been found by now.
        """
        is_found = self._gate is not None and self._gate.controller.search is not None
        return self.window_size if is_found else self._seats

    @property
    def window_size(self) -> int:
        """What a batch may have while there are no other users; twice all if there never are."""
        if self._gate is None:
            return 2 * self._seats
        return self._gate.controller.most

    @property
    def gate(self) -> ShareGate | None:
        """The gate that reads the server's metrics; None if it has no other users."""
        return self._gate

    @property
    def _address(self) -> ServerAddress:
        return self._addresses[0]

    @property
    def _where(self) -> str:
        return self._address.shown

    @property
    def metrics_socket(self) -> None:
        """None: its operator scrapes the server's own ``/metrics``."""
        return None

    @property
    def prompt_counter(self) -> None:
        """None: its tokenizer is on another machine."""
        return

    @property
    def live_server(self) -> None:
        """None: its users reach it without us."""
        return None

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Check that the server answers and accepts our key.

        Raises :class:`~batchyard.errors.EngineStartFailed` if it does not; if that may pass,
        :class:`~batchyard.errors.EngineNotReady`.
        """
        await self.stop()
        self._session = open_session(self._address, self._api_key, self._ssl_context)
        try:
            models = await self._find()
            await self._ask_for_seats()
        except BaseException:
            await self.stop()
            raise
        if models is not None:
            self._was_listed = self._was_listed or self.model in models
            for name in sorted({self.model, *self.adapters} - models):
                log.warning("engine.model_not_listed", model=name, server=self._where)
        if on_progress is not None:
            on_progress(StartProgress("ready", 1.0))

    async def stop(self) -> None:
        """Close the connections to the server. The server itself keeps running."""
        asked, self._salted_urls = self._salted_urls, None
        if asked is not None:
            asked.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def routes(self) -> Routes | None:
        """Read them from ``/openapi.json``, if the server has one."""
        status, body = await self._get("/openapi.json")
        return self.kind.routes(body) if status == 200 else None

    async def work_done(self) -> float | None:
        """The number from the ``/metrics`` of a server with requests, if its kind has one.

        If the metrics say that there are no requests, they are those of another server than the
        one with ours, behind a load balancer. Raises :class:`~batchyard.errors.EngineLost`.
        """
        gauges = self.kind.gauges
        if gauges is None:
            return None
        metrics = await self._metrics()
        return gauges.work_done(metrics) if gauges.requests(metrics) else None

    async def occupancy(self) -> Occupancy | None:
        """From its ``/metrics``, all its users' requests included; None if its kind has none.

        Raises :class:`~batchyard.errors.EngineLost`.
        """
        gauges = self.kind.gauges
        return None if gauges is None else gauges.occupancy(await self._metrics())

    async def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
    ) -> AsyncGenerator[EngineAnswer, None]:
        """See :meth:`batchyard.engine.base.Engine.stream`."""
        session = self._open_session()
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=LOOK_TIMEOUT_SECONDS)

        async def answer(request: EngineRequest) -> EngineAnswer:
            return await self._post(session, request, timeout)

        def answers_to(
            admitted: AsyncIterable[EngineRequest | Abort],
        ) -> AsyncGenerator[EngineAnswer, None]:
            return answer_concurrently(admitted, answer)

        gate = self._gate
        answers = answers_to(requests) if gate is None else gate.stream(requests, answers_to)
        async with contextlib.aclosing(answers):
            async for one in answers:
                yield one

    def _new_gate(self, objective: Objective | None, reserve_seats: int | None) -> ShareGate:
        controller = ShareController(
            self._seats,
            are_known=self._given_seats is not None,
            objective=objective,
            reserve_seats=reserve_seats,
        )
        look = MetricsLook(self._where, lambda: self._get("/metrics"), self._load_of, controller)
        return ShareGate(self._where, controller, look, expected_tokens)

    def _load_of(self, metrics: str) -> ServerLoad | None:
        return None if self.kind.gauges is None else self.kind.gauges.load(metrics)

    async def _metrics(self) -> str:
        """The server's metrics; empty if it has none."""
        status, body = await self._get("/metrics")
        if status >= 500:
            raise EngineLost(f"the engine at {self._where} has no metrics (HTTP {status})")
        return body.decode(errors="replace") if status == 200 else ""

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a short exchange."""
        session, url = self._open_session(), self._address.url(path)
        try:
            look = await look_at(session, url)
        except (aiohttp.ClientError, OSError) as error:
            raise self._not_reached(error) from error
        return look.status, look.body

    async def _post(
        self,
        session: aiohttp.ClientSession,
        request: EngineRequest,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - it is aiohttp's
    ) -> EngineAnswer:
        body = unstreamed(request)
        salt = request.of_batch.cache_salt
        if salt is not None and await self._is_salted(request):
            body = spliced(body, salt)
        if self._priority is not None and request.content_type == "application/json":
            body = with_member(body, "priority", self._priority)
        # Some servers take only what can be read as a UUID.
        bare_id = request.request_id.removeprefix(REQUEST_ID_PREFIX)
        headers = {"Content-Type": request.content_type, "X-Request-Id": bare_id}
        if request.of_batch.traceparent is not None:
            headers["traceparent"] = request.of_batch.traceparent
        try:
            async with session.post(
                self._address.url(request.url),
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                answer = await read_up_to(response, server_client.MAX_ANSWER_BYTES)
                if answer is None:
                    return EngineAnswer(request.tag, 500, ANSWER_TOO_LONG)
                retry_after = retry_after_seconds(response.headers.get("Retry-After"))
                await self._check_is_of_line(response.status, answer)
                return http_answer(
                    request.tag,
                    response.status,
                    answer,
                    retry_after,
                    content_type=response.headers.get("Content-Type", ""),
                    location=location_of(response),
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # Nothing was sent: it is not this request that failed.
            raise self._not_reached(error) from error
        except TimeoutError:
            return EngineAnswer(request.tag, None, no_answer=NoAnswer.TIMEOUT)
        except (aiohttp.ClientError, OSError):
            return EngineAnswer(request.tag, None, no_answer=NoAnswer.CONNECTION_LOST)

    async def _is_salted(self, request: EngineRequest) -> bool:
        """Whether the server takes a salt for this request. Others may refuse unknown fields."""
        if request.content_type != "application/json":
            return False
        if self._takes_cache_salt is not None:
            return self._takes_cache_salt
        if self._salted_urls is None:
            self._salted_urls = asyncio.create_task(self._ask_for_salted_urls())
        salted_urls = await asyncio.shield(self._salted_urls)
        return self._address.below_base(request.url) in salted_urls

    async def _ask_for_salted_urls(self) -> frozenset[str]:
        status, body = await self._get("/openapi.json")
        if status >= 500:
            raise EngineNotReached(
                f"the engine at {self._where} has no routes (HTTP {status}): if that lasts, set "
                f"{FIELD} of its block"
            )
        urls = routes_with_field(body, FIELD) if status == 200 else frozenset()
        if not urls:
            self._warn_once(
                "engine.cache_shared",
                f"The server does not say that it takes {FIELD}: tenants share what it has "
                "cached of prompts.",
            )
        return urls

    async def _ask_for_seats(self) -> None:
        """A server that does not tell is taken to be small."""
        if self._given_seats is not None:
            return
        told = await seats_of(self.kind, self._get)
        if told is not None:
            self._seats = told
            if self._gate is not None:
                self._gate.controller.set_seats(told, are_known=self.kind.seats_are_known)
        controller = None if self._gate is None else self._gate.controller
        if controller is not None and not controller.are_known:
            then = "" if controller.search is None else ", and then as many as are fastest"
            self._warn_once(
                "engine.seats_unknown",
                "The server does not say how many requests it runs at once, and others may use "
                f"it: the batch keeps {controller.most} in flight at first{then}. "
                "Set max_num_seqs of the block or --engine-seats, or, if no one else uses it, "
                "exclusive.",
            )

    def _warn_once(self, event: str, text: str) -> None:
        """Warn of what the server answered, which is asked anew at each start."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning(event, text, server=self._where)

    async def _find(self) -> set[str] | None:
        """Where the server is, at the first time, and the models that it lists; None: no list."""
        if self._is_found:
            models = await self._list_models()
            if self._was_listed and models is not None and self.model not in models:
                raise EngineNotReady(self._lacks_model("any more"))  # some answer nevertheless
            return models
        found = await find_server(self._addresses, self._ask)
        self._addresses, self._is_found = (found.address,), True
        self.kind = await recognise(self._get, found.listing)
        log.info("engine.recognised", server=self._where, kind=self.kind.name)
        if self.kind.usage is Usage.CHARACTERS:
            self._warn_once(
                "engine.usage_of_characters",
                "The server counts characters and calls them tokens: usage, quotas and prices of "
                "its batches count characters.",
            )
        return found.models

    async def _list_models(self) -> set[str] | None:
        look = await self._ask(self._address.url(MODELS))
        check_look(self._address, look)
        if self._was_listed and look.status == 404:
            raise EngineNotReady(f"the engine at {self._where} has no list of models any more")
        return listed_models(look.body)

    async def _ask(self, url: str, body: bytes | None = None) -> Look:
        method = "GET" if body is None else "POST"
        try:
            return await look_at(self._open_session(), url, method=method, body=body)
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineNotReady(
                f"cannot reach the engine for model {self.model!r} at {self._where}: {detail};"
                " check that the server runs and that the URL is right"
            ) from error

    async def _check_is_of_line(self, status: int, answer: bytes) -> None:
        """Raises :class:`~batchyard.errors.EngineNotReached` if the server has the model or our key
        no more: all requests get such an answer then, and it is about none of them."""
        self._has_answered = self._has_answered or 200 <= status < 300
        may_lack = self.kind.may_lack(self.model, status, answer)
        # A gateway whose server is away may say 404 to everything.
        if status not in {401, 404} and not may_lack:
            return
        try:
            models = await self._list_models()
        except EngineStartFailed as error:
            if isinstance(error.__cause__, TimeoutError):
                return  # it is not known
            raise EngineNotReached(str(error)) from error
        is_known = self._was_listed or not self._has_answered
        is_about_model = may_lack or status == 401
        if is_about_model and is_known and models is not None and self.model not in models:
            raise EngineNotReached(self._lacks_model(f"(HTTP {status})"))

    def _lacks_model(self, more: str) -> str:
        return f"the engine at {self._where} does not serve model {self.model!r} {more}"

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineLost(f"the engine for model {self.model!r} is not started")
        return self._session

    def _not_reached(self, error: Exception) -> EngineNotReached:
        detail = str(error) or type(error).__name__
        return EngineNotReached(
            f"lost the engine for model {self.model!r} at {self._where}: {detail}"
        )
