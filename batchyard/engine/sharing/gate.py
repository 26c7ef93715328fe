"""The gate of an engine that others use too: it looks, and lets through what its controller allows.

Where a look comes from is the owner's: a server's metrics, or a count of one's own. The engine that
has the gate tells it of each request that it sends and of each that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import Abort
from batchyard.engine.sharing.request_size import work_of
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable

    from batchyard.engine.base import EngineAnswer, EngineRequest
    from batchyard.engine.sharing.controller import ShareController
    from batchyard.engine.sharing.observation import Observation

    Streaming = Callable[[AsyncIterable[EngineRequest | Abort]], AsyncGenerator[EngineAnswer, None]]

log = event_logger(__name__)

POLL_SECONDS: Final = 0.25
LOOK_SECONDS: Final = 3.0
"""How long one look may take."""
SEARCH_SECONDS: Final = 30.0
"""How often a server with nothing to look at is asked whether it has it now."""
TOLD_AFTER_SECONDS: Final = 10.0
"""A pause is logged when it has lasted for this long."""
_REFUSALS: Final = frozenset({429, 503})
"""An engine that answers so has no room."""


class NotObservable(Exception):
    """There is nothing to look at, and that is no fault."""


class LookFailed(Exception):
    """There is something to look at, and it was not seen; the text says why."""


class ShareGate:
    """``look`` returns what is seen now. It raises :class:`NotObservable` for an engine that has
    nothing to look at; any other exception of it counts as no answer.

    ``tokens_of`` guesses how many tokens a request will be, prompt and answer.
    """

    def __init__(
        self,
        where: str,
        controller: ShareController,
        look: Callable[[], Awaitable[Observation]],
        tokens_of: Callable[[EngineRequest], float],
    ) -> None:
        self.controller = controller
        self._where = where
        self._look_now = look
        self._tokens_of = tokens_of
        self._on_open: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._reason = "it has not been observed yet"
        self._closed_at: float | None = None
        self._is_told = False

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent now."""
        return self.controller.may_send(time.monotonic())

    async def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], answers_of: Streaming
    ) -> AsyncGenerator[EngineAnswer, None]:
        """What ``answers_of`` makes of the requests, each counted for as long as it is there."""
        keys: dict[int, object] = {}
        try:
            async with (
                contextlib.aclosing(self._counted(requests, keys)) as counted,
                contextlib.aclosing(answers_of(counted)) as answers,
            ):
                async for answer in answers:
                    self._ended(keys.pop(answer.tag, None), answer)
                    yield answer
        finally:
            for key in keys.values():
                self.controller.lost(time.monotonic(), key)

    async def _counted(
        self, requests: AsyncIterable[EngineRequest | Abort], keys: dict[int, object]
    ) -> AsyncGenerator[EngineRequest | Abort, None]:
        async for request in requests:
            if not isinstance(request, Abort):
                keys[request.tag] = key = object()
                self._sent(key, request)
            yield request

    def observe(self, seen: Observation) -> None:
        """Take note of what was seen, also between two looks."""
        self.controller.observe(time.monotonic(), seen)
        self._reason = (
            f"{seen.waiting:.0f} requests wait in its queue"
            if seen.waiting
            else f"{seen.live:.0f} requests of others run there"
        )
        self._call_if_open()

    async def watch(self, on_open: Callable[[], None], has_requests: Callable[[], bool]) -> None:
        """Observe the engine until cancelled; ``on_open`` is called whenever there is room.

        ``has_requests`` says whether any wait here, which makes a pause worth logging.
        """
        self._on_open.add(on_open)
        try:
            while True:
                is_observable = await self._look()
                self._tell(is_waiting=has_requests())
                await asyncio.sleep(POLL_SECONDS if is_observable else SEARCH_SECONDS)
        finally:
            self._on_open.discard(on_open)

    def _sent(self, key: object, request: EngineRequest) -> None:
        now = time.monotonic()
        self.controller.sent(now, key, self._tokens_of(request), request.sequences)
        pause = self.controller.opens_at() - now
        if pause > 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(pause, self._call_if_open)

    def _ended(self, key: object, answer: EngineAnswer) -> None:
        now, controller = time.monotonic(), self.controller
        if answer.status is None:
            controller.lost(now, key)
        else:
            work = None if controller.search is None else work_of(answer)
            controller.ended(now, key, is_refused=answer.status in _REFUSALS, work=work)

    def _call_if_open(self) -> None:
        if self.is_open:
            for on_open in self._on_open:
                on_open()

    async def _look(self) -> bool:
        """Whether there is something to look at."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                seen = await self._look_now()
        except NotObservable:
            self.controller.unobservable()
            self._call_if_open()
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was observed
            why = error if isinstance(error, LookFailed) else type(error).__name__
            self._reason = f"its metrics cannot be read ({why})"
            return True
        self.observe(seen)
        return True

    def _tell(self, *, is_waiting: bool) -> None:
        now = time.monotonic()
        if not is_waiting or self.controller.in_flight or self.is_open:
            if self._is_told:
                log.info("engine.free", "It has room again.", server=self._where)
            self._closed_at, self._is_told = None, False
            return
        if self._closed_at is None:
            self._closed_at = now
        if not self._is_told and now - self._closed_at >= TOLD_AFTER_SECONDS:
            self._is_told = True
            log.warning(
                "engine.busy",
                f"{self._reason}, and others use this server. The batch continues when there is "
                "room.",
                server=self._where,
            )
