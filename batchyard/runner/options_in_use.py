"""The options that a runner's engine runs with besides its own, and the way back to none.

Whatever goes wrong with other options than the engine's own counts against these options, and not
against the requests that were in flight: the engine is started with its own ones again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from batchyard.logs import event_logger
from batchyard.services.log_words import describe
from batchyard.tuning.points import DEFAULT, written

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchyard.engine.base import Engine, StartProgress
    from batchyard.results import ResultLine
    from batchyard.runner.window_request import WindowRequest
    from batchyard.tuning.points import Kind, Point

log = event_logger(__name__)

_LEAST_PATIENCE_SECONDS: Final = 120.0
_PATIENCE: Final = 3.0
"""A start with other options may take so many times as long as the slowest without."""


class OptionsInUse:
    """Of one engine; of one that may not be tuned they are always its own.

    The tuner sets ``on_result``, ``on_begin`` (the seconds for which nothing ran) and
    ``on_failure`` (options that did not work, and the kinds of them that a request cannot have).
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self.point: Point = DEFAULT
        self.is_trial = False
        """A request that gets no good answer now is sent again when the trial is over."""
        self._wanted: tuple[Point, bool] = (DEFAULT, False)
        self._idle_since: float | None = None
        self._slowest_start = 0.0
        self.on_result: Callable[[WindowRequest, ResultLine], None] | None = None
        self.on_begin: Callable[[float], None] | None = None
        self.on_failure: Callable[[Point, Collection[Kind]], None] | None = None

    def want(self, point: Point, *, is_trial: bool) -> None:
        """Use these from the next start on."""
        self._wanted = (point, is_trial)
        self._idle_since = self._clock()

    def keep(self) -> None:
        """The trial is over, and its options stay."""
        self.is_trial = False

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Start the engine with what is wanted, or with its own options if that does not work.

        Raises what the engine's start without other options raises.
        """
        began = self._clock()
        (point, is_trial), idle_since = self._wanted, self._idle_since
        if point != DEFAULT:
            point, is_trial = await self._try(point, is_trial, on_progress)
        if point == DEFAULT:
            began_own = self._clock()
            self._use(DEFAULT, is_trial=False)
            await self._engine.start(on_progress)
            self._slowest_start = max(self._slowest_start, self._clock() - began_own)
        self._wanted, self._idle_since = (point, is_trial), None
        if self.on_begin is not None:
            self.on_begin(self._clock() - (began if idle_since is None else idle_since))

    def are_the_cause(self) -> bool:
        """The engine was lost. Whether that counts against its options, which are its own again."""
        if self.point == DEFAULT:
            return False
        self._fail(self.point)
        return True

    def refuse(self, body: bytes) -> bool:
        """Whether the engine would refuse the request because of options that it has from us.

        Then its own ones are wanted.
        """
        if self.point == DEFAULT or self._engine.tunable is None:
            return False
        kinds = self._engine.tunable.refused(body)
        if kinds:
            log.info("tuning.not_suited", written(self.point), model=self._engine.model)
            self._fail(self.point, kinds)
        return bool(kinds)

    async def _try(
        self,
        point: Point,
        is_trial: bool,
        on_progress: Callable[[StartProgress], None] | None,
    ) -> tuple[Point, bool]:
        """Start with other options; what the engine runs with then: nothing if it does not run."""
        # If the engine has not run yet, it is unknown how long its model takes to load.
        slowest = self._slowest_start
        patience = max(_LEAST_PATIENCE_SECONDS, _PATIENCE * slowest) if slowest else None
        self._use(point, is_trial=is_trial)
        try:
            async with asyncio.timeout(patience):
                await self._engine.start(on_progress)
        except Exception as error:  # noqa: BLE001 - whatever it is, its own options are known to work
            reason = describe(error)
            log.warning(
                "tuning.not_started", f"{written(point)}: {reason}", model=self._engine.model
            )
            self._fail(point)
            await self._engine.stop()
            return DEFAULT, False
        return point, is_trial

    def _use(self, point: Point, *, is_trial: bool) -> None:
        self.point, self.is_trial = point, is_trial
        if self._engine.tunable is not None:
            self._engine.tunable.use(point)

    def _fail(self, point: Point, kinds: Collection[Kind] = ()) -> None:
        self.want(DEFAULT, is_trial=False)
        if self.on_failure is not None:
            self.on_failure(point, kinds)
