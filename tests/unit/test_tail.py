"""Long answers go first, as far as the shared prefixes allow."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchyard.plan.cache import CacheShape, prefix_tree, simulate
from batchyard.plan.tail import kind_starts, longest_first, samples_first


def ordered(prompts: list[int], shared: list[int], outputs: list[int]) -> list[int] | None:
    order = longest_first(np.array(prompts), np.array(shared), np.array(outputs))
    return None if order is None else order.tolist()


def test_where_nothing_is_shared_the_longest_go_first() -> None:
    outputs = [10, 520, 12, 600, 11]
    assert ordered([50] * 5, [0] * 5, outputs) == [1, 3, 0, 2, 4]


def test_answers_of_about_one_length_are_left_as_they_are() -> None:
    assert ordered([50] * 3, [0] * 3, [128, 200, 255]) is None


def test_one_request_has_no_order() -> None:
    assert ordered([50], [0], [1]) is None


def test_requests_with_a_long_prefix_in_common_stay_together() -> None:
    """Two documents, two questions each; one answer on the second document is long."""
    shared = [0, 1000, 5, 1000]
    assert ordered([1010] * 4, shared, [10, 10, 10, 500]) == [2, 3, 0, 1]


def test_a_prefix_that_all_share_hinders_nobody() -> None:
    assert ordered([1010] * 4, [0, 1000, 1000, 1000], [10, 500, 10, 500]) == [1, 3, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4000)), min_size=2, max_size=60))
def test_hardly_anything_is_read_twice_for_it(requests: list[tuple[int, int]]) -> None:
    shared = [share for share, _ in requests]
    outputs = [output for _, output in requests]
    order = ordered([310] * len(requests), shared, outputs)
    if order is None:
        return
    assert sorted(order) == list(range(len(requests)))
    shared[0] = 0
    kept = sum(min(shared[min(a, b) + 1 : max(a, b) + 1]) for a, b in itertools.pairwise(order))
    work = 310 * len(requests) - sum(shared) + sum(outputs)
    assert sum(shared) - kept <= 0.02 * work


def test_the_end_of_a_batch_is_shorter_by_a_quarter() -> None:
    """2,500 requests on 256 sequences, a tenth of them sixteen times as long as the rest."""
    rng = np.random.default_rng(1)
    outputs = np.where(rng.random(2500) < 0.1, 2048, 128)
    prompts, shared = np.full(2500, 200), np.zeros(2500, dtype=int)
    order = longest_first(prompts, shared, outputs)
    assert order is not None
    tree = prefix_tree(prompts, shared, 16)
    before, after = (
        simulate(tree, sequence, prompts.tolist(), outputs.tolist(), CacheShape(100_000)).steps
        for sequence in (range(2500), order.tolist())
    )
    assert after < 0.75 * before


def sampled(classes: list[int], unknown: set[int], shared: int = 0) -> list[int] | None:
    order = samples_first(
        np.array(classes), unknown, np.full(len(classes), shared), work=100 * len(classes)
    )
    return None if order is None else order.tolist()


def test_some_of_each_class_of_which_nothing_is_known_go_first() -> None:
    order = sampled([1] * 300 + [2] * 300 + [3] * 300, {2, 3})
    assert order is not None
    assert order[:56] == [*range(300, 328), *range(600, 628)]
    assert order[56:60] == [0, 1, 2, 3]
    assert sorted(order) == list(range(900))


def test_where_all_is_known_or_there_is_one_class_nothing_goes_first() -> None:
    assert sampled([1] * 300 + [2] * 300, set()) is None
    assert sampled([1] * 600, {1}) is None


def test_of_few_requests_no_sample_is_taken() -> None:
    assert sampled([1] * 200 + [2] * 200, {1, 2}) is None


def test_a_sample_that_costs_a_long_prefix_is_not_taken() -> None:
    assert sampled([1] * 300 + [2] * 300, {1, 2}, shared=2000) is None


def test_ever_new_classes_are_no_sample() -> None:
    order = sampled([1] * 600 + list(range(2, 102)) * 2, set(range(2, 102)))
    assert order is not None
    firsts = [place for place in order[: len(order) // 16] if place >= 600]
    assert 0 < len(firsts) <= 50


def starts(classes: list[int], unknown: set[int], shared: int = 0) -> dict[int, int]:
    shares = np.full(len(classes), shared)
    return kind_starts(np.array(classes), unknown, shares, 100 * len(classes), least=50)


def test_a_chunk_begins_with_each_kind_of_which_nothing_is_known() -> None:
    """And behind it, and behind the samples."""
    samples = [1] * 8 + [2] * 8
    found = starts(samples + [1] * 90 + [2] * 90 + [3] * 90, {1, 2})
    assert found == {16: 0, 106: 0, 196: 0}


def test_a_large_kind_of_which_nothing_is_known_is_cut_into_pieces_that_take_turns() -> None:
    found = starts([1] * 128 + [2] * 192 + [3] * 90, {1, 2})
    assert found == {64: 1, 128: 0, 192: 1, 256: 2, 320: 0}


def test_kinds_are_cut_into_so_few_pieces_that_their_prefixes_are_seldom_read_again() -> None:
    found = starts([1] * 256 + [2] * 256, {1, 2}, shared=300)
    assert found == {128: 1, 256: 0, 384: 1}


def test_a_kind_that_is_known_or_has_few_requests_begins_no_chunk() -> None:
    assert starts([1] * 90 + [2] * 90, set()) == {}
    assert starts([1] * 90 + [2, 3] * 90, {2, 3}) == {}
    assert starts([1] * 300, {1}) == {}


def test_kinds_that_share_a_long_prefix_stay_in_one_chunk() -> None:
    assert starts([1] * 90 + [2] * 90, {1, 2}, shared=5000) == {}
