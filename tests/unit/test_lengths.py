"""How long answers were: means, quantiles, what is forgotten, and what one class borrows."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.plan.length_classes import ClassCounter, hashed
from batchyard.plan.lengths import (
    Expected,
    LengthClass,
    LengthHistory,
    Lengths,
    bucket_of,
    expectation_of,
)

CHAT = "/v1/chat/completions"
A, B = LengthClass(CHAT, "a" * 32, 9), LengthClass(CHAT, "b" * 32, 9)


def lengths_of(*tokens: int) -> Lengths:
    found = Lengths()
    for each in tokens:
        found.add(each)
    return found


def lognormal(count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [max(1, round(100 * chance.lognormvariate(0, 1))) for _ in range(count)]


@pytest.mark.parametrize(
    ("limit", "bucket"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (256, 9), (257, 10), (512, 10)]
)
def test_the_largest_limit_of_a_bucket_is_a_power_of_two(limit: int, bucket: int) -> None:
    assert bucket_of(limit) == bucket


def test_requests_without_a_limit_have_buckets_by_their_samples() -> None:
    assert [bucket_of(None, samples) for samples in (1, 2, 3, 4)] == [0, -1, -1, -2]


def test_the_mean_is_exact_while_nothing_fades() -> None:
    assert lengths_of(10, 20, 60).mean == 30.0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_quantile_is_known_to_within_a_tenth(share: float) -> None:
    tokens = lognormal(20_000)
    exact = sorted(tokens)[int(share * len(tokens))]
    assert lengths_of(*tokens).quantile(share) == pytest.approx(exact, rel=0.1)


def test_nothing_seen_has_no_length() -> None:
    nothing = Lengths()
    assert (nothing.mean, nothing.quantile(0.9), nothing.rest, nothing.last_of(8)) == (0, 0, 0, 0)


def test_old_answers_fade_behind_new_ones() -> None:
    old, new = lengths_of(*[1000] * 100), lengths_of(*[10] * 15_000)
    after = old.followed_by(new)
    assert after.mean == pytest.approx(10, rel=0.1)
    assert after.weight < 15_100
    assert after.quantile(0.999) < 20


def test_of_answers_that_differ_much_those_under_way_are_the_long_ones() -> None:
    """At any moment they are more than their share: half of such a one is more than the mean."""
    tokens = lognormal(20_000)
    under_way = sum(each * each for each in tokens) / 2 / sum(tokens)
    assert under_way > 1.2 * statistics.mean(tokens)
    assert lengths_of(*tokens).rest == pytest.approx(under_way, rel=0.1)


def test_what_the_last_of_many_answers_lacks_is_that_of_a_running_engine() -> None:
    """The answers under way at random moments, and the longest rest among 64 of them."""
    tokens = lognormal(20_000)
    chance = random.Random(2)
    rests = []
    for _ in range(400):
        running = chance.choices(tokens, weights=tokens, k=64)
        rests.append(max(each * (1 - chance.random()) for each in running))
    assert lengths_of(*tokens).last_of(64) == pytest.approx(statistics.median(rests), rel=0.15)


@given(st.lists(st.integers(0, 2**31), max_size=50), st.lists(st.integers(0, 2**31), max_size=50))
def test_answers_joined_are_answers_counted_together(left: list[int], right: list[int]) -> None:
    joined = lengths_of(*left).joined(lengths_of(*right), len(right))
    together = lengths_of(*left, *right)
    assert (joined.weight, joined.histogram) == (together.weight, together.histogram)
    assert joined.tokens == pytest.approx(together.tokens)


def test_answers_that_go_on_count_as_those_that_were_longer() -> None:
    """Of 400 answers that began together, half have come: the short ones."""
    tokens = sorted(lognormal(400))
    come, going_on = lengths_of(*tokens[:200]), [float(tokens[199])] * 200
    assert come.mean < 0.4 * statistics.mean(tokens)
    known = lengths_of(*lognormal(2000, seed=3)).joined(come, 200)
    assert known.with_in_flight(going_on).mean == pytest.approx(statistics.mean(tokens), rel=0.15)
    assert come.with_in_flight(going_on).mean > 1.5 * come.mean


def test_an_answer_that_goes_on_has_no_more_than_its_request_allows() -> None:
    found = lengths_of(*[100] * 10).with_in_flight([120.0] * 10, 128.0)
    assert found.weight == 20
    assert found.mean <= 128.0


def test_what_an_answer_lacks_is_that_of_the_longer_ones() -> None:
    known = lengths_of(*[10] * 50, *[1000] * 50)
    assert known.lacks(20.0) == pytest.approx(980, rel=0.1)
    assert known.lacks(0.0) == pytest.approx(505, rel=0.1)
    assert known.lacks(3000.0) == 1500.0


def test_a_class_of_which_little_is_known_borrows_from_all_templates() -> None:
    history = LengthHistory()
    history.add({A: lengths_of(*[1000] * 50)})
    borrowed = history.of(B)
    assert borrowed is not None
    assert borrowed.mean == 1000
    assert not history.is_known(B)
    history.add({B: lengths_of(*[10] * 50)})
    own = history.of(B)
    assert own is not None
    assert own.mean < 60


def test_a_few_answers_say_nothing_yet() -> None:
    history = LengthHistory()
    history.add({A: lengths_of(*[1000] * 3)})
    assert history.of(A) is None


def test_other_endpoints_and_limits_are_not_borrowed_from() -> None:
    history = LengthHistory()
    history.add({A: lengths_of(*[1000] * 50)})
    assert history.of(A._replace(bucket=10)) is None
    assert history.of(A._replace(endpoint="/v1/completions")) is None


def test_what_is_expected_of_a_chunk_replaces_what_was_planned() -> None:
    planned = {1: (10, 2560), 2: (5, 1280)}
    assert expectation_of(100, planned, {}) == (3940, 17)
    assert expectation_of(100, planned, {1: Expected(20.0, 20.0)}) == (1580, 14)


def test_a_class_without_an_answer_of_its_own_goes_first() -> None:
    found = expectation_of(0, {1: (10, 2560)}, {1: Expected(20.0, 700.0)})
    assert found == (200, 19)


def test_a_template_of_few_requests_has_no_class_of_its_own() -> None:
    counter = ClassCounter()
    many = [counter.add(CHAT, b"many", 256, 1) for _ in range(8)]
    few = [counter.add(CHAT, b"few", 256, 1) for _ in range(7)]
    found = counter.finish(LengthHistory(), b"key")
    templates = [found.table[found.numbers[each] - 1].template for each in (many[0], few[0])]
    assert templates == [hashed(b"many", b"key"), ""]


def test_a_template_that_is_known_has_its_class_however_few_there_are() -> None:
    each = LengthClass(CHAT, hashed(b"few", b"key"), 9)
    history = LengthHistory()
    history.add({each: lengths_of(*[30] * 20)})
    counter = ClassCounter()
    number = counter.add(CHAT, b"few", 256, 1)
    found = counter.finish(history, b"key")
    assert found.table[found.numbers[number] - 1] == each
    assert found.expected(found.numbers[number], 256) == 30


def test_no_more_is_expected_of_an_answer_than_its_request_allows() -> None:
    history = LengthHistory()
    for bucket in (9, 0):
        history.add({LengthClass(CHAT, "", bucket): lengths_of(*[200] * 20)})
    counter = ClassCounter()
    limited, unlimited = counter.add(CHAT, b"x", 150, 1), counter.add(CHAT, b"x", None, 1)
    found = counter.finish(history, b"")
    assert found.expected(found.numbers[limited], 150) == 150
    assert found.expected(found.numbers[unlimited], 150) == 200


def test_a_file_of_ever_new_templates_fills_no_memory() -> None:
    counter = ClassCounter()
    numbers = {counter.add(CHAT, str(each).encode(), 256, 1) for each in range(10_000)}
    assert len(numbers) <= 4097


def test_a_batch_has_no_more_classes_than_its_row_has_room_for() -> None:
    counter = ClassCounter()
    for each in range(1000):
        for _ in range(8):
            counter.add(CHAT, str(each).encode(), 256, 1)
    assert len(counter.finish(LengthHistory(), b"key").table) <= 201


def test_one_template_has_another_hash_for_each_tenant() -> None:
    hashes = {hashed(b"template", key) for key in (b"one", b"two")}
    assert len(hashes) == 2
    assert all(len(each) == 32 for each in hashes)
