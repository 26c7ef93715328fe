"""The tuner: what it tries, when it stops, what it keeps and remembers; in simulated time."""

from __future__ import annotations

import pytest

from batchyard.tuning.copied import copied_share
from batchyard.tuning.points import (
    DEFAULT,
    Axis,
    Kind,
    Point,
    known_of,
    read_point,
    words_of,
    written,
)
from batchyard.tuning.samples import Answered, Meter, Sample
from batchyard.tuning.search import MOST_PROBES, Search
from batchyard.tuning.shapes import Shape, Tuned
from batchyard.tuning.tuner import Change, Tuner

SEATS = 16
STEPS = Axis("max-num-batched-tokens", ("32768",), Kind.STEPS)
GUESSES = Axis("speculative-config", ('{"method": "suffix"}', '{"method": "ngram"}'), Kind.GUESSES)
SPLIT = Axis("tensor-parallel-size", ("2",), Kind.SPLIT)
AXES = (SPLIT, STEPS, GUESSES)
LARGER, HALVES = (("max-num-batched-tokens", "32768"),), (("tensor-parallel-size", "2"),)
READS = Answered(800, 0, 10)
WRITES = Answered(50, 50, 400)
PLANNED = Shape.of(800, 10, 0.0)


def sample(answer: Answered, rate: float = 100.0, requests: int = 100) -> Sample:
    tokens = requests * (answer.computed_prompt + answer.output)
    sums = [requests * each for each in answer]
    return Sample(requests, *sums, (tokens,) * 3, (tokens / rate,) * 3)


class Site:
    """An engine whose requests take ``seconds_of`` its options, all alike."""

    def __init__(
        self, tuner: Tuner, seconds_of: dict[Point, float], answer: Answered = READS
    ) -> None:
        self.tuner, self.seconds_of, self.answer = tuner, seconds_of, answer
        self.now = 0.0
        self.changes: list[Change] = []

    def begin(self, *, restart_seconds: float = 60.0) -> None:
        first = self.tuner.first(PLANNED)
        self.tuner.begun(self.now, first, restart_seconds, is_trial=False)
        self.restart_seconds = restart_seconds

    def serve(self, seconds: float, *, left: float = 1e6, is_full: bool = True) -> None:
        until, looked_at = self.now + seconds, self.now
        while self.now < until:
            self.now += self.seconds_of.get(self.tuner.point, 1.0)
            self.tuner.count(self.now, self.answer)
            if self.now - looked_at < 1:
                continue
            looked_at = self.now
            change = self.tuner.look(self.now, is_full=is_full, left_requests=left)
            if change is not None:
                self.changes.append(change)
                self.now += self.restart_seconds
                self.tuner.begun(
                    self.now, change.point, self.restart_seconds, is_trial=change.is_trial
                )

    @property
    def tried(self) -> list[Point]:
        return [change.point for change in self.changes if change.is_trial]


def test_a_shape_is_written_and_read() -> None:
    for shape in (Shape.of(1000, 50, 0.4), Shape.of(1000, 50, 0.4, 0.9)):
        assert Shape.read(str(shape)) == shape


def test_work_that_is_alike_is_near_and_other_work_is_not() -> None:
    shape = Shape.of(1000, 100, 0.5, 0.1)
    assert shape.distance(Shape.of(1400, 80, 0.6, 0.15)) <= 1
    assert shape.distance(Shape.of(30, 100, 0.5, 0.1)) > 1
    assert shape.distance(Shape.of(1000, 5000, 0.5, 0.1)) > 1
    assert shape.distance(Shape.of(1000, 100, 0.5, 0.8)) > 1
    assert shape.distance(Shape.of(1000, 100, 0.5)) == 0


def test_options_are_written_and_read() -> None:
    point = (*LARGER, ("speculative-config", '{"method": "ngram", "n": 4}'))
    assert read_point(written(point)) == point
    assert words_of(point)[:2] == ["--max-num-batched-tokens", "32768"]
    assert read_point(written(DEFAULT)) == DEFAULT


def test_what_the_operator_has_set_meanwhile_is_forgotten() -> None:
    gains: dict[Point, float | None] = {DEFAULT: 1.0, LARGER: 1.4, HALVES: None}
    assert known_of((STEPS,), gains) == {DEFAULT: 1.0, LARGER: 1.4}


def test_words_of_the_request_and_repeated_words_are_copied() -> None:
    request = "please copy the quick brown fox jumps over"
    assert copied_share(request, "the quick brown fox jumps over") == 1.0
    assert copied_share(request, "nothing of this was ever said before here") == 0.0
    assert copied_share(request, "a b c d a b c d a b c d a b c d") == pytest.approx(10 / 14)
    assert copied_share(request, "too short") is None


def test_the_first_answers_of_an_engine_are_not_measured() -> None:
    meter = Meter(SEATS, 0.0)
    for number in range(SEATS):
        meter.count(number * 100.0, WRITES)
    now = (SEATS - 1) * 100.0
    while not meter.parts:
        now += 1.0
        meter.count(now, READS)
    found = meter.sample()
    assert found is not None
    assert (found.rate, found.requests) == (810, 48)


def test_work_that_only_writes_is_not_probed_for_larger_steps_or_guesses() -> None:
    assert Search((STEPS, GUESSES), sample(WRITES), copied=0.1).next() is None


def test_guesses_are_tried_where_answers_copy() -> None:
    point = Search((STEPS, GUESSES), sample(WRITES), copied=0.8).next()
    assert point == (("speculative-config", '{"method": "suffix"}'),)


def test_an_option_that_gains_is_kept_as_others_are_tried() -> None:
    search = Search((SPLIT, STEPS), sample(READS), copied=0.0)
    assert search.next() == HALVES
    search.record(HALVES, 1.5)
    assert search.next() == tuple(sorted((*HALVES, *LARGER)))
    search.record(tuple(sorted((*HALVES, *LARGER))), 0.9)
    assert search.best == HALVES
    assert search.next() is None


def test_a_gain_within_the_error_is_none() -> None:
    search = Search((SPLIT,), sample(READS), copied=0.0)
    search.record(HALVES, 1.06, error=0.08)
    assert search.best == DEFAULT
    known = Tuned(PLANNED, PLANNED, {DEFAULT: 1.0, **search.gains}, is_done=True)
    assert known.best == DEFAULT


def test_there_is_an_end_to_probes() -> None:
    many = [Axis(f"option-{n}", ("1",), Kind.SPLIT) for n in range(9)]
    search, gaining = Search(many, sample(READS), copied=0.0), 0
    while (point := search.next()) is not None:
        search.record(point, 1.1)
        gaining += 1
    assert gaining == MOST_PROBES
    search, fruitless = Search(many, sample(READS), copied=0.0), 0
    while (point := search.next()) is not None:
        search.record(point, 0.99)
        fruitless += 1
    assert fruitless == 2


def test_the_fastest_options_are_found_and_remembered() -> None:
    site = Site(Tuner((SPLIT, STEPS), SEATS), {DEFAULT: 0.1, HALVES: 0.05, LARGER: 0.09})
    site.begin()
    site.serve(3000)
    assert site.tried[0] == HALVES
    assert site.tuner.point == HALVES
    assert site.tuner.is_done
    learned = site.tuner.learned
    assert learned is not None
    assert learned.is_done
    assert learned.gain == pytest.approx(2.0, rel=0.1)
    again = Site(Tuner((SPLIT, STEPS), SEATS, [learned]), site.seconds_of)
    again.begin()
    assert again.tuner.point == HALVES
    again.serve(600)
    assert not again.changes
    assert again.tuner.is_done


def test_options_that_are_slower_are_left_after_a_part_of_a_sample() -> None:
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1, HALVES: 0.5})
    site.begin()
    site.serve(600)
    assert [change.point for change in site.changes] == [HALVES, DEFAULT]
    assert site.tuner.point == DEFAULT


def test_nothing_is_tried_where_little_is_left() -> None:
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1, HALVES: 0.05})
    site.begin(restart_seconds=60)
    site.serve(300, left=20_000)
    assert not site.changes
    learned = site.tuner.learned
    assert learned is not None
    assert not learned.is_done
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1, HALVES: 0.05})
    site.begin(restart_seconds=60)
    site.serve(300, left=50_000)
    assert site.tried == [HALVES]


def test_an_engine_that_is_not_full_is_not_measured() -> None:
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1, HALVES: 0.05})
    site.begin()
    site.serve(600, is_full=False)
    assert not site.changes
    assert site.tuner.learned is None


def test_samples_of_other_work_are_not_compared() -> None:
    """Answers that became short are no gain."""
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1, HALVES: 0.05})
    site.begin()
    site.serve(100)
    assert site.tried == [HALVES]
    site.answer = Answered(800, 0, 2000)
    site.serve(600)
    assert site.tuner.point == DEFAULT
    assert site.tuner.is_done


def test_options_for_other_work_are_left_once_the_work_is_seen() -> None:
    other = Tuned(Shape.of(800, 10, 0, 0.9), PLANNED, {DEFAULT: 1.0, LARGER: 2.0}, is_done=True)
    site = Site(Tuner((STEPS,), SEATS, [other]), {DEFAULT: 0.05, LARGER: 0.1})
    site.begin(restart_seconds=10)
    assert site.tuner.point == LARGER
    for _ in range(20):
        site.tuner.count_copied(0.0)
    site.serve(200)
    assert site.changes[0] == Change(DEFAULT, is_trial=False)


def test_options_that_failed_are_not_tried_again() -> None:
    site = Site(Tuner((SPLIT,), SEATS), {DEFAULT: 0.1})
    site.begin()
    site.serve(100)
    assert site.tried == [HALVES]
    site.tuner.failed(HALVES)
    site.tuner.begun(site.now, DEFAULT, 60, is_trial=False)
    assert site.tuner.after_failure(site.now, 1e6) is None
    assert site.tuner.is_done
    learned = site.tuner.learned
    assert learned is not None
    assert learned.gains[HALVES] is None
    assert learned.best == DEFAULT
