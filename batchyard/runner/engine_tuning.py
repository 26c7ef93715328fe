"""Tunes a runner's engine by the work that it does anyway, and remembers what was fastest.

:mod:`batchyard.tuning` decides. Here the answers are counted, what is left of the work is looked
up, and the engine is started again with other options. Whatever fails here ends the tuning of this
runner, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard import intervals
from batchyard.answer_checks import text_of
from batchyard.errors import StoreError
from batchyard.logs import event_logger
from batchyard.results import Outcome
from batchyard.services.log_words import describe
from batchyard.store import EngineKey, RunnerKind
from batchyard.tuning.copied import copied_share
from batchyard.tuning.points import DEFAULT, known_of, read_point, written
from batchyard.tuning.samples import Answered
from batchyard.tuning.shapes import Shape, Tuned
from batchyard.tuning.tuner import Change, Tuner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from batchyard.engine.base import Engine
    from batchyard.engine.tunable import Tunable, TuningFacts
    from batchyard.results import ResultLine
    from batchyard.runner.options_in_use import OptionsInUse
    from batchyard.runner.window import Window
    from batchyard.runner.window_request import WindowRequest
    from batchyard.services.services import Services
    from batchyard.store import TuningRecord, WorkLeft
    from batchyard.tuning.points import Kind, Point

log = event_logger(__name__)

_PATIENCE_SECONDS: Final = 10.0
_LEFT_SECONDS: Final = 10.0
"""What is left of the work is asked for as often."""
_EACH: Final = 7
"""Of so many answers one is looked at for what it copies."""
_MOST_BYTES: Final = 1 << 18


class EngineTuning:
    """Of one runner. ``batch_id``: it serves only that batch."""

    def __init__(
        self,
        services: Services,
        model: str,
        engine: Engine,
        options: OptionsInUse,
        *,
        batch_id: str | None = None,
    ) -> None:
        self._services = services
        self._model = model
        self._engine = engine
        self._options = options
        self._batch_id = batch_id
        self._tuner: Tuner | None = None
        self._key: EngineKey
        self._saved: Tuned | None = None
        self._failures: list[tuple[Point, Collection[Kind]]] = []
        self._answers = self._errors = 0
        """Before the first trial."""
        self._left: tuple[float, float] = (-_LEFT_SECONDS, 0.0)
        """When it was asked for, and requests."""
        self._has_failed = False

    async def begin(self) -> None:
        """Before the engine's first start: look up what suits the work. Raises nothing."""
        if self._engine.tunable is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._remember(self._engine.tunable)
        except Exception as error:  # noqa: BLE001 - the engine runs with its own options
            log.warning("tuning.failed", describe(error), model=self._model)

    @asynccontextmanager
    async def going_on(self, window: Window) -> AsyncIterator[None]:
        """Tune the engine of the window while the block runs."""
        tuning = asyncio.create_task(self._keep_tuning(window), name="tuning")
        try:
            yield
        finally:
            tuning.cancel()
            await asyncio.wait([tuning])

    async def _remember(self, tunable: Tunable) -> None:
        facts, store = await tunable.facts(), self._services.store
        self._key = _key_of(self._model, facts)
        known = [_read(record, facts) for record in await store.tunings.of(self._key)]
        self._tuner = tuner = Tuner(facts.axes, self._engine.max_num_seqs, known)
        work = await store.tunings.open_work(self._model, self._batch_id)
        point = tuner.first(_shape_of(work)) if work.requests else DEFAULT
        if point != DEFAULT:
            log.info("tuning.remembered", written(point), model=self._model)
        self._options.want(point, is_trial=False)
        self._options.on_begin = self._begun
        self._options.on_failure = self._failed
        self._options.on_result = self._count

    def _begun(self, idle_seconds: float) -> None:
        assert self._tuner is not None  # noqa: S101 - it has set the callback
        options = self._options
        self._tuner.begun(time.monotonic(), options.point, idle_seconds, is_trial=options.is_trial)

    def _failed(self, point: Point, kinds: Collection[Kind]) -> None:
        self._failures.append((point, kinds))

    def _count(self, request: WindowRequest, result: ResultLine) -> None:
        tuner = self._tuner
        if tuner is None or tuner.is_done:
            return
        if not self._options.is_trial:
            self._answers += 1
            self._errors += result.outcome is Outcome.ERROR
        if result.outcome is Outcome.ERROR:
            return
        used = result.usage
        computed = max(0, used.input_tokens - used.cached_tokens)
        tuner.count(time.monotonic(), Answered(computed, used.cached_tokens, used.output_tokens))
        if tuner.wants_copied and self._answers % _EACH == 1:
            share = _copied_share(request.body, result.line)
            if share is not None:
                tuner.count_copied(share)

    async def _keep_tuning(self, window: Window) -> None:
        tuner = self._tuner
        if tuner is None:
            return
        try:
            while True:
                await asyncio.sleep(intervals.TUNING_SECONDS)
                if tuner.is_done and not self._failures:
                    continue
                await self._look(tuner, window)
                if tuner.is_done:
                    self._say(tuner)
        except Exception as error:  # noqa: BLE001 - the batches go on
            log.warning("tuning.failed", describe(error), model=self._model)
            if self._options.is_trial:
                await self._change(window, Change(DEFAULT, is_trial=False))
        finally:
            self._end_trial(window)

    async def _look(self, tuner: Tuner, window: Window) -> None:
        now, change = time.monotonic(), None
        left = await self._left_requests(now)
        if self._options.is_trial and self._is_bad(window):
            log.info("tuning.not_suited", written(tuner.point), model=self._model)
            self._failures.append((tuner.point, ()))
        if self._failures:
            for point, kinds in self._failures:
                tuner.failed(point, kinds)
            self._failures.clear()
            if window.is_streaming:
                change = tuner.after_failure(now, left)
        else:
            change = tuner.look(now, is_full=self._is_full(window), left_requests=left)
        await self._save(tuner)
        if change is not None:
            await self._change(window, change)
        elif not tuner.is_trial:
            self._end_trial(window)

    def _end_trial(self, window: Window) -> None:
        """The options on trial stay, and what waits for others is sent."""
        if self._options.is_trial:
            self._options.keep()
            window.send_postponed()

    def _is_full(self, window: Window) -> bool:
        """Whether the engine has all that it can run."""
        seats = min(self._engine.max_num_seqs, window.limit)
        # Where its cache is small it has no room for as many as it has seats.
        return window.is_streaming and (window.in_flight >= seats or window.queued > 0)

    def _is_bad(self, window: Window) -> bool:
        """Whether the options on trial fail requests that others would answer."""
        is_stuck = window.postponed and not (window.in_flight or window.queued)
        return bool(is_stuck) or window.postponed > 2 * self._errors

    async def _change(self, window: Window, change: Change) -> None:
        if change.is_trial:
            log.info("tuning.trial", written(change.point), model=self._model)
        self._options.want(change.point, is_trial=change.is_trial)
        await window.change_options()

    def _say(self, tuner: Tuner) -> None:
        learned = tuner.learned
        if learned is not None:
            tried = len(learned.gains) - 1
            words = written(learned.best) or "its own options"
            log.info(
                "tuning.chosen",
                f"{words}: {learned.gain:.2f} times the speed, {tried} tried",
                model=self._model,
            )

    async def _left_requests(self, now: float) -> float:
        """This engine's share of what is left, as it was a moment ago."""
        asked_at, left = self._left
        if now - asked_at >= _LEFT_SECONDS:
            with self._reporting():
                left = await self._read_left()
            self._left = (now, left)
        return left

    async def _read_left(self) -> float:
        store = self._services.store
        async with asyncio.timeout(_PATIENCE_SECONDS):
            work = await store.tunings.open_work(self._model, self._batch_id)
            runners = await store.runners.live(
                kind=RunnerKind.CHUNKS,
                within_seconds=self._services.settings.lease_seconds,
                model=self._model,
            )
        if work.requests and self._tuner is not None:
            # By now more is known of how long answers are.
            self._tuner.planned = _shape_of(work)
        return work.requests / max(1, len(runners))

    async def _save(self, tuner: Tuner) -> None:
        """Write what is new. If that fails, the next look tries it again."""
        learned = tuner.learned
        if learned is None or learned == self._saved:
            return
        gains = {written(point): gain for point, gain in learned.gains.items()}
        with self._reporting():
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._services.store.tunings.record(
                    self._key,
                    shape=str(learned.shape),
                    planned=str(learned.planned),
                    gains=gains,
                    is_done=learned.is_done,
                )
            self._saved = learned

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """The database may answer again; that it did not is logged once."""
        try:
            yield
        except (StoreError, TimeoutError) as error:
            if not self._has_failed:
                log.warning("tuning.not_stored", describe(error), model=self._model)
            self._has_failed = True
        else:
            self._has_failed = False


def _key_of(model: str, facts: TuningFacts) -> EngineKey:
    return EngineKey(model=model, device=facts.device, version=facts.version, options=facts.options)


def _read(record: TuningRecord, facts: TuningFacts) -> Tuned:
    gains = {read_point(text): gain for text, gain in record.gains.items()}
    known = known_of(facts.axes, gains)
    return Tuned(Shape.read(record.shape), Shape.read(record.planned), known, record.is_done)


def _shape_of(work: WorkLeft) -> Shape:
    """Of what is planned."""
    unshared = 8 * work.prompt_work / max(1.0, work.prompt_tokens)
    return Shape.of(
        work.prompt_tokens / work.requests, work.output_tokens / work.requests, 1 - unshared
    )


def _copied_share(body: bytes, line: bytes) -> float | None:
    """What an answer copies; None for one without a text, or a very long one."""
    if len(body) + len(line) > _MOST_BYTES:
        return None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        text = text_of(msgspec.json.decode(line)["response"]["body"])
        return None if text is None else copied_share(body.decode(), text)
    return None
