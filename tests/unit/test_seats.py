"""Which requests an engine runs, and how much of their answers is there."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from batchyard.runner.meters.seats import Seats


@dataclass(eq=False)
class Request:
    unshared_tokens: int = 0
    seated_at: float | None = None
    read_before: int = 0


@dataclass
class Engine:
    """Two seats."""

    now: float = 0.0
    seats: Seats = field(init=False)

    def __post_init__(self) -> None:
        self.seats = Seats(2, clock=lambda: self.now)

    def sent(self, unshared_tokens: int = 0) -> Request:
        request = Request(unshared_tokens)
        self.seats.take(request)
        return request

    def answer(self, request: Request, tokens: int) -> None:
        self.seats.leave(request)
        self.seats.count(request, tokens)


def test_the_speed_of_an_answer_begins_when_its_request_has_a_seat() -> None:
    engine = Engine()
    first, second, waits = engine.sent(), engine.sent(), engine.sent()
    engine.now = 10.0
    engine.answer(first, 100)
    assert engine.seats.answer_speed == pytest.approx(10.0)
    engine.now = 15.0
    assert engine.seats.written(waits) == pytest.approx(50.0)
    engine.answer(waits, 50)
    assert engine.seats.answer_speed == pytest.approx(10.0)
    assert engine.seats.all_written([first, second]) == pytest.approx(300.0)


def test_one_that_waits_has_written_nothing() -> None:
    engine = Engine()
    first, _, waits = engine.sent(), engine.sent(), engine.sent()
    engine.now = 10.0
    engine.answer(first, 100)
    later = engine.sent()
    engine.now = 20.0
    assert engine.seats.written(later) == 0.0
    assert engine.seats.written(waits) == pytest.approx(100.0)


def test_one_that_leaves_before_it_has_a_seat_frees_none() -> None:
    engine = Engine()
    _, _, waits = engine.sent(), engine.sent(), engine.sent()
    engine.seats.leave(waits)
    assert engine.sent().seated_at is None


def test_more_seats_are_for_those_that_wait_and_fewer_are_free_when_enough_have_left() -> None:
    engine = Engine()
    first, second, third, waits = (engine.sent() for _ in range(4))
    engine.seats.resize(3)
    assert third.seated_at is not None
    assert waits.seated_at is None
    engine.seats.resize(1)
    engine.seats.leave(first)
    engine.seats.leave(second)
    assert waits.seated_at is None
    engine.seats.leave(third)
    assert waits.seated_at is not None
    assert engine.sent().seated_at is None


def test_one_that_is_sent_again_begins_anew() -> None:
    engine = Engine()
    request = engine.sent()
    engine.now = 10.0
    engine.seats.leave(request)
    engine.seats.take(request)
    assert engine.seats.written(request) == 0.0
    assert request.seated_at == 10.0


def test_the_prompt_of_a_request_is_read_when_it_has_a_seat() -> None:
    engine = Engine()
    first, _, _ = engine.sent(100), engine.sent(10), engine.sent(1)
    assert engine.seats.read == 110
    engine.answer(first, 5)
    assert engine.seats.read == 111
    assert engine.seats.prompt_cost.is_measured
