"""How much of a chunk is left: by its requests, and by what is written of those in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from batchyard.plan.lengths import LengthClass, LengthHistory
from batchyard.plan.records import RECORD, PlannedRequest
from batchyard.runner.chunk.chunk_rest import ChunkRest
from batchyard.runner.meters.learning import BatchLengths, TenantLengths
from batchyard.runner.meters.seats import Seats

CHAT = "/v1/chat/completions"
SHORT, LONG = 1, 2


@dataclass(eq=False)
class Request:
    unshared_tokens: int = 0
    seated_at: float | None = None
    read_before: int = 0


class Clock:
    now = 0.0


class Chunk:
    """Ten requests with answers of 10 tokens and ten of 1,000, as far as is known."""

    def __init__(self, *, left: int = 20) -> None:
        self.clock = Clock()
        self.seats = Seats(4, clock=lambda: self.clock.now)
        tenant = TenantLengths(LengthHistory())
        table = [LengthClass(CHAT, template * 32, 0) for template in "ab"]
        self.lengths = BatchLengths(tenant, table, 20)
        for _ in range(100):
            self.lengths.count(SHORT, 10)
            self.lengths.count(LONG, 1000)
        tenant.learn()
        self.records = np.zeros(20, dtype=RECORD)
        self.records["prompt_tokens"] = 1
        self.records["output_tokens"] = 256
        self.records["length_class"] = [SHORT] * 10 + [LONG] * 10
        records: list[Any] = list(self.records)
        self.rest = ChunkRest(self.lengths, self.seats, self.records, records[-left:])

    def send(self, place: int) -> Request:
        request = Request()
        self.seats.take(request)
        self.rest.send(request, PlannedRequest.of(self.records[place]))
        return request

    def answer(self, request: Request, tokens: int) -> None:
        self.seats.leave(request)
        self.seats.count(request, tokens)
        self.rest.answer(request)


def test_half_of_the_requests_may_be_most_of_the_work() -> None:
    chunk = Chunk()
    assert chunk.rest.share == 1.0
    for place in range(10, 20):
        chunk.answer(chunk.send(place), 0)
    assert chunk.rest.share == pytest.approx(0.01, abs=0.002)


def test_what_is_written_of_answers_in_flight_is_not_left() -> None:
    chunk = Chunk()
    first, _ = chunk.send(0), chunk.send(10)
    chunk.clock.now = 1.0
    chunk.answer(first, 500)
    before = chunk.rest.share
    assert chunk.rest.written(LONG) == pytest.approx([500.0])
    chunk.clock.now = 1.8
    assert before - chunk.rest.share == pytest.approx(400 / 10_100, rel=0.2)


def test_what_an_earlier_owner_finished_is_not_left() -> None:
    assert Chunk(left=5).rest.share == pytest.approx(0.495, abs=0.01)


def test_a_chunk_of_which_only_copies_are_left_has_a_rest() -> None:
    chunk = Chunk()
    copies = np.zeros(3, dtype=RECORD)
    rest = ChunkRest(chunk.lengths, chunk.seats, copies, list(copies))
    request = Request()
    rest.send(request, PlannedRequest.of(copies[0]))
    rest.answer(request)
    assert rest.share == 0.0


def test_a_chunk_that_is_given_back_says_nothing_of_lengths_any_more() -> None:
    chunk = Chunk()
    chunk.send(10)
    chunk.answer(chunk.send(0), 10)
    chunk.clock.now = 1.0
    chunk.answer(chunk.send(1), 10)
    chunk.clock.now = 5000.0
    chunk.lengths.tenant.learn()
    chunk.rest.close()
    assert chunk.lengths.under_way == set()
    assert chunk.lengths.expected()[LONG].tokens == pytest.approx(1000.0)
