"""What a runner has as soon as its engine runs: the window, what fills it, and what measures it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from batchyard.metrics import metric_families as families
from batchyard.metrics.published import Figures
from batchyard.runner.claims.claims import Claims
from batchyard.runner.meters.engine_watch import EngineWatch
from batchyard.runner.meters.learning import Learning
from batchyard.runner.meters.pace import Pace
from batchyard.runner.window.admission import AdmissionQueue
from batchyard.runner.window.gates import GATES, lines_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.engine.base import Engine
    from batchyard.metrics.published import Counters
    from batchyard.runner.chunk.chunk_answers import Done
    from batchyard.runner.claims.held_chunks import HeldChunks
    from batchyard.runner.claims.releases import Releases
    from batchyard.runner.meters.load_meter import LoadMeter
    from batchyard.runner.registration import Registration
    from batchyard.runner.window.window import Window
    from batchyard.schedule.turns import QueueEntry
    from batchyard.services.services import Services
    from batchyard.store import EngineLoad

_GAUGES: Final = (
    families.READY,
    families.INFLIGHT,
    families.QUEUED,
    families.WINDOW,
    families.REFUSING,
)


def figures_before() -> Figures:
    """The numbers of a runner whose engine does not run yet."""
    gauges = dict.fromkeys((each.name for each in _GAUGES), 0.0)
    waiting = dict.fromkeys((gate.name for gate in GATES), 0.0)
    return Figures(gauges, parts={families.LINES_WAITING.name: waiting})


class Serving:
    """``window`` takes the lines of the chunks in ``held``, as ``queue`` lets them in.

    Chunks of ``batch_id``, or of all batches of ``model`` that its engine ``suits``, are claimed.
    """

    def __init__(
        self,
        services: Services,
        engine: Engine,
        window: Window,
        held: HeldChunks,
        releases: Releases,
        *,
        model: str,
        batch_id: str | None,
        suits: Callable[[QueueEntry], bool],
    ) -> None:
        self.window = window
        self.queue = AdmissionQueue(max(1, window.size // 2), self.fill)
        window.room.on_room(self.queue.look)
        self.claims = Claims(
            services, model, self.queue, releases, held, batch_id=batch_id, suits=suits
        )
        self.learning = Learning(services, model, seats=engine.max_num_seqs)
        self._pace = Pace(window)
        self.has_claimed_all = False
        """Whether there was nothing more to claim when that was looked for last."""
        self.watch = EngineWatch(engine)
        self._held = held
        self._engine = engine

    @contextlib.asynccontextmanager
    async def measured(self, registration: Registration | None) -> AsyncIterator[None]:
        """While the block runs, learn from answers, and watch how full the engine is."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.learning.going_on())
            await stack.enter_async_context(self.watch.going_on())
            if registration is not None:
                self.window.seats.prompt_cost.believed = await registration.prompt_weight()
            yield

    def fill(self) -> None:
        """Use the whole window, once what there is to claim is here and takes part."""
        if self.has_claimed_all and self.queue.have_all_begun:
            self.window.fill()

    def figures(self) -> Figures:
        """The numbers at this moment, for metrics."""
        window, socket = self.window, self._engine.metrics_socket
        waiting = lines_waiting(window, self._held.running.values())
        parts: Counters = {families.LINES_WAITING.name: dict(waiting)}
        if not window.is_streaming:
            return replace(figures_before(), parts=parts)
        now = (1, window.in_flight, window.queued, window.limit, window.refusals.seconds)
        gauges = dict(zip((each.name for each in _GAUGES), now, strict=True))
        return Figures(gauges, socket=None if socket is None else str(socket), parts=parts)

    async def report(self, registration: Registration) -> None:
        """Record the throughput, if it was measured."""
        tokens_per_second = self._pace.measured(is_busy=bool(self._held.running))
        if tokens_per_second is not None:
            cost = self.window.seats.prompt_cost
            await registration.report(tokens_per_second, self._pace, cost)

    def count(self, done: Done, output_tokens: int) -> None:
        """A request was answered."""
        self._pace.count(done.tokens, output_tokens, done.answer_tokens)

    def load(self, meter: LoadMeter) -> EngineLoad:
        """What the engine has to do now."""
        occupancy = self.watch.occupancy
        return meter.load(
            running=self.window.in_flight,
            waiting=self.window.queued,
            window=self.window.limit,
            cache_used=None if occupancy is None else occupancy.cache_used,
        )
