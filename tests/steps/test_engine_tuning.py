"""Engines that are tuned while a batch runs: what they begin with, keep, and never cost."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from batchyard.engine.stub import Fault, FaultKind, StubEngine
from batchyard.engine.tunable import TuningFacts, refused_kinds
from batchyard.errors import EngineStartFailed
from batchyard.runner import engine_tuning
from batchyard.store import EngineKey
from batchyard.tuning import samples, tuner
from batchyard.tuning.points import DEFAULT, Axis, Kind
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from batchyard.engine.base import StartProgress
    from batchyard.tuning.points import Point

MODEL = "stub-model"
FAST: Point = (("tensor-parallel-size", "2"),)
GUESSING: Point = (("speculative-config", "{}"),)
AXES = (
    Axis("tensor-parallel-size", ("2",), Kind.SPLIT),
    Axis("speculative-config", ("{}",), Kind.GUESSES),
)
KEY = EngineKey(model=MODEL, device="stub", version="1", options="none")
SEATS = 8
SLOW_SECONDS, FAST_SECONDS = 0.08, 0.02
TUNED = "--tensor-parallel-size 2"


class TunableStub(StubEngine):
    """It is faster with ``FAST``. With ``broken`` options it does not start."""

    worked_seconds: ClassVar = 0.0
    """What the answers of all of them take if the machine has time for nothing else."""

    def __init__(self, *, broken: Point | None = None, **options: Any) -> None:
        super().__init__(MODEL, max_num_seqs=SEATS, latency=self._seconds, **options)
        self.point: Point = DEFAULT
        self.broken = broken
        self.begun: list[Point] = []

    def _seconds(self, _: bytes) -> float:
        seconds = FAST_SECONDS if self.point == FAST else SLOW_SECONDS
        TunableStub.worked_seconds += seconds / SEATS
        return seconds

    @property
    def tunable(self) -> TunableStub:
        return self

    async def facts(self) -> TuningFacts:
        return TuningFacts(KEY.device, KEY.version, KEY.options, AXES)

    def use(self, point: Point) -> None:
        self.point = point

    def refused(self, body: bytes) -> Collection[Kind]:
        return refused_kinds(self.point, body)

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        self.begun.append(self.point)
        if self.broken is not None and self.point == self.broken:
            raise EngineStartFailed("these options are too much for it")
        await super().start(on_progress)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LEAST_PART_SECONDS", 0.01)
    monkeypatch.setattr(samples, "LEAST_PART_ANSWERS", 8)
    monkeypatch.setattr(tuner, "MOST_SPENT", 2.0)
    # By the real clock, the faster options may be the slower ones on a busy machine.
    clock = SimpleNamespace(monotonic=lambda: TunableStub.worked_seconds)
    monkeypatch.setattr(engine_tuning, "time", clock)


def lines(count: int = 260, **body: Any) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}", **body) for n in range(count)]


async def run(yard: Yard, engine: TunableStub, requests: list[dict[str, Any]]) -> None:
    """Run them as a batch, whose lines must all be answered, each once."""
    yard.use(engine)
    yard.set(chunk_requests=100)
    batch = await yard.run(requests)
    assert (batch.completed, batch.failed) == (len(requests), 0)
    answered = Counter(each["custom_id"] for each in await yard.results(batch.output_file_id))
    assert answered == Counter(each["custom_id"] for each in requests)


async def gains(yard: Yard) -> dict[str, float | None]:
    (known,) = await yard.services.store.tunings.of(KEY)
    return known.gains


async def test_the_next_batch_of_a_shape_begins_with_what_was_fastest(yard: Yard) -> None:
    first = TunableStub()
    await run(yard, first, lines())
    assert first.begun == [DEFAULT, FAST]
    assert first.executed == 260
    assert ((await gains(yard))[TUNED] or 0) > 1
    second = TunableStub()
    await run(yard, second, lines())
    assert second.begun == [FAST]


async def test_options_that_do_not_start_cost_no_line_and_are_remembered(yard: Yard) -> None:
    engine = TunableStub(broken=FAST)
    await run(yard, engine, lines(150))
    assert engine.begun == [DEFAULT, FAST, DEFAULT]
    assert (await gains(yard))[TUNED] is None
    again = TunableStub()
    await run(yard, again, lines(150))
    assert again.begun == [DEFAULT]


async def test_options_with_which_the_engine_dies_cost_no_line(yard: Yard) -> None:
    """The request that was in flight is not taken for the cause."""
    engine = TunableStub()
    deaths = Fault(FaultKind.DEATH, matches=lambda _: engine.point == FAST)
    engine._faults, engine._matched = (deaths,), [0]
    await run(yard, engine, lines(150))
    assert engine.begun == [DEFAULT, FAST, DEFAULT]
    assert (await gains(yard))[TUNED] is None


async def test_requests_that_options_on_trial_fail_are_sent_again(yard: Yard) -> None:
    engine = TunableStub()
    refusals = Fault(FaultKind.ANSWER, matches=lambda _: engine.point == FAST, status=400)
    engine._faults, engine._matched = (refusals,), [0]
    await run(yard, engine, lines(150))
    assert engine.begun == [DEFAULT, FAST, DEFAULT]
    assert (await gains(yard))[TUNED] is None


async def test_a_request_that_guesses_would_fail_runs_without_them(yard: Yard) -> None:
    first = TunableStub()
    await run(yard, first, lines())
    (known,) = await yard.services.store.tunings.of(KEY)
    guessing = {"": 1.0, "--speculative-config '{}'": 2.0}
    await yard.services.store.tunings.record(
        KEY, shape=known.shape, planned=known.planned, gains=guessing, is_done=True
    )
    second = TunableStub()
    await run(yard, second, [*lines(20), chat_line("biased", logit_bias={"5": 1})])
    assert second.begun == [GUESSING, DEFAULT]
    assert (await gains(yard))["--speculative-config '{}'"] is None


async def test_an_engine_with_little_to_do_is_left_as_it_is(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "MOST_SPENT", 1e-6)
    engine = TunableStub()
    await run(yard, engine, lines(150))
    assert engine.begun == [DEFAULT]


async def test_a_batch_runs_where_what_was_tuned_cannot_be_read(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineKey] = []

    async def broken(key: EngineKey) -> None:
        asked.append(key)
        raise RuntimeError("a defect")

    monkeypatch.setattr(yard.services.store.tunings, "of", broken)
    engine = TunableStub()
    await run(yard, engine, lines(20))
    assert asked
    assert engine.begun == [DEFAULT]
