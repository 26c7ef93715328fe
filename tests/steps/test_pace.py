"""How fast a runner is, whatever is half done when one looks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from batchyard.runner.meters.pace import Pace


@dataclass
class Engine:
    """Answers at a speed; ``look`` is what a runner does once a second."""

    in_flight: int = 0
    withdrawn: int = 0
    written: float = 0.0
    answer_speed: float | None = None
    read: int = 0
    now: float = 0.0
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace = Pace(self, sample_seconds=5.0, clock=lambda: self.now)

    def run(self, seconds: int, *, answers: int = 0, tokens: float = 100.0) -> None:
        """``answers`` in each second, evenly."""
        for _ in range(seconds):
            self.now += 1.0
            for _ in range(answers):
                self.pace.count(tokens)
            self.look(is_busy=True)

    def look(self, *, is_busy: bool) -> None:
        rate = self.pace.measured(is_busy=is_busy)
        if rate is not None:
            self.rates.append(rate)


def test_a_steady_stream_has_its_rate() -> None:
    engine = Engine(in_flight=10)
    engine.run(60, answers=20)
    assert len(engine.rates) > 5
    assert engine.rates == pytest.approx([2000.0] * len(engine.rates), rel=0.25)


def test_long_answers_in_flight_are_no_sign_of_a_slow_engine() -> None:
    """512 answers that take 100 seconds each: no sample says almost nothing a second."""
    engine = Engine()
    engine.look(is_busy=True)
    engine.in_flight = 512
    engine.run(99)
    assert engine.rates == []
    engine.run(1, answers=512)
    engine.run(99)
    engine.run(1, answers=512)
    assert engine.rates == pytest.approx([512.0] * 2, rel=0.3)


def test_what_was_half_done_is_counted_once() -> None:
    """As the window fills and as it empties."""
    engine = Engine()
    engine.look(is_busy=True)
    engine.in_flight = 100
    engine.run(10)
    engine.run(10, answers=10)
    engine.in_flight = 0
    engine.run(10, answers=10)
    total = sum(rate * seconds for rate, seconds in zip(engine.rates, (20, 5, 5), strict=True))
    assert total == pytest.approx(200 * 100.0)


def test_what_was_aborted_says_nothing() -> None:
    """A batch that expires with few answers: they took no longer than others."""
    engine = Engine(in_flight=500)
    engine.look(is_busy=True)
    engine.run(60)
    engine.run(1, answers=3)
    engine.in_flight, engine.withdrawn = 0, 497
    engine.look(is_busy=False)
    assert engine.rates == []
    engine.in_flight = 10
    engine.look(is_busy=True)
    engine.run(20, answers=20)
    assert engine.rates == pytest.approx([2000.0] * len(engine.rates), rel=0.3)


def test_time_without_work_does_not_count() -> None:
    engine = Engine()
    engine.look(is_busy=True)
    engine.run(3, answers=20)
    engine.now += 1000.0
    engine.look(is_busy=False)
    engine.now += 1000.0
    engine.look(is_busy=True)
    engine.run(3, answers=20)
    assert engine.rates == pytest.approx([2000.0], rel=0.2)


def test_what_is_written_of_answers_in_flight_is_counted_once() -> None:
    """All 512 write 10 tokens a second; in the first sample few of them come to an end.

    One in ten gets an answer each second, and the next one, with a prompt of 40 tokens, its seat.
    """
    engine = Engine(in_flight=512)
    engine.look(is_busy=True)
    for second in range(1, 11):
        engine.now += 1.0
        engine.written = 5120.0 * second - 52 * 100.0 * second
        for _ in range(52):
            engine.pace.count(110.0, 100, 100)
            engine.read += 40
        engine.look(is_busy=True)
    assert engine.pace.prompt_rate == pytest.approx(52 * 40)
    assert engine.pace.work_rate == pytest.approx(5120 + 52 * 40 / 8, rel=0.05)


def test_what_was_answered_before_the_first_look_is_not_counted() -> None:
    engine = Engine(in_flight=10)
    for _ in range(40):
        engine.pace.count(100.0)
    engine.look(is_busy=True)
    engine.run(5, answers=20)
    assert engine.rates == pytest.approx([2000.0])


def test_prompts_of_the_first_requests_are_counted_as_they_take_time() -> None:
    """A window full of prompts is read for a while before the first answer comes."""
    engine = Engine()
    engine.in_flight, engine.read = 10, 1000
    engine.look(is_busy=True)
    engine.run(5, answers=20)
    assert engine.pace.prompt_rate == pytest.approx(200.0)


def test_prompts_of_what_was_answered_before_the_first_look_are_not_counted() -> None:
    engine = Engine()
    engine.in_flight, engine.read = 10, 1000
    engine.pace.count(100.0)
    engine.look(is_busy=True)
    engine.run(5, answers=20)
    assert engine.pace.prompt_rate == 0.0


def test_an_engine_that_writes_nothing_has_no_speed_of_answers() -> None:
    engine = Engine(in_flight=10)
    engine.run(20, answers=20)
    assert engine.rates
    assert engine.pace.answer_speed is None
