"""Which plans begin alike: what a sample of their trees tells of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.plan.planner import _common_prefix
from batchyard.plan.roots import MOST_NODES, NO_ROOTS, Roots, RootSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT = b"/v1/chat/completions\0"


def documents(count: int, *, seed: int = 0, size: int = 2000) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def sampled(
    prompts: Sequence[bytes], *, secret: bytes = b"", head: bytes = CHAT, answer_tokens: int = 10
) -> Roots:
    """The roots of a plan of these prompts."""
    sampler = RootSampler(secret)
    previous, work = b"", 0
    for rank, prompt in enumerate(sorted(prompts)):
        shared = _common_prefix(previous, prompt)
        sampler.add(head + prompt, shared, rank)
        work += (len(prompt) - shared) // 4 + answer_tokens
        previous = prompt
    return sampler.finish(work)


def questions(texts: Sequence[bytes], each: int, *, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [text + rng.randbytes(40) for text in texts for _ in range(each)]


def test_batches_about_the_same_documents_are_worth_joining() -> None:
    texts = documents(300)
    one, other = (sampled(questions(texts, 3, seed=seed)) for seed in (1, 2))
    assert one.part_in(other) == pytest.approx(1.0)
    assert one.is_worth_joining(other)


def test_batches_about_other_documents_are_not() -> None:
    one, other = (sampled(questions(documents(300, seed=seed), 3, seed=seed)) for seed in (1, 2))
    assert one.part_in(other) == 0
    assert not one.is_worth_joining(other)


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_the_common_part_is_estimated_from_the_sample(part: float) -> None:
    mine = documents(1000, seed=1)
    count = int(1000 * part)
    one = sampled(mine)
    other = sampled(mine[:count] + documents(2000, seed=2))
    assert len(one.nodes) == len(other.nodes) == MOST_NODES
    assert one.part_in(other) == pytest.approx(part, abs=0.2)


def test_long_answers_are_no_reason_to_run_side_by_side() -> None:
    """The batch would end later for what the other one writes."""
    texts = documents(300)
    one, other = (sampled(questions(texts, 3, seed=seed), answer_tokens=1000) for seed in (1, 2))
    assert one.part_in(other) == pytest.approx(1.0)
    assert not one.is_worth_joining(other)


def test_equal_prompts_of_two_caches_have_nothing_in_common() -> None:
    texts = documents(50)
    assert sampled(texts, secret=b"one").part_in(sampled(texts, secret=b"other")) == 0


def test_equal_prompts_of_two_endpoints_have_nothing_in_common() -> None:
    texts = documents(50)
    assert sampled(texts).part_in(sampled(texts, head=b"/v1/completions\0")) == 0


def test_short_prompts_have_no_roots() -> None:
    """They cost nothing to read again."""
    assert sampled(documents(50, size=500)).nodes == ()
    assert not NO_ROOTS.is_worth_joining(sampled(documents(50)))


def test_the_place_beside_another_plan_is_that_of_the_same_document() -> None:
    texts = sorted(documents(40))
    one = sampled(questions(texts, 1, seed=1))
    other = sampled(questions(texts, 5, seed=2))
    for rank in (0, 50, 101, 199):
        assert one.place_beside(other, rank) == rank // 5
    assert one.place_beside(sampled(documents(9, seed=9)), 3) is None


def test_before_the_first_common_document_the_place_is_there() -> None:
    texts = sorted(documents(20))
    one, other = sampled(texts[10:]), sampled(texts)
    assert one.place_beside(other, 0) == 0
    assert other.place_beside(one, 0) == 10


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.data())
def test_every_beginning_is_sampled_once(sizes: list[int], data: st.DataObject) -> None:
    """As if each were looked for in all prompts: the shared bytes leave none out."""
    base = documents(1, size=3000)[0]
    prompts = [base[: 500 + 5 * size] + bytes([data.draw(st.integers(0, 3))]) for size in sizes]
    roots = sampled(prompts)
    assert len({node.digest for node in roots.nodes}) == len(roots.nodes)
    depths = {node.depth for node in roots.nodes}
    for depth in depths:
        beginnings = {prompt[:depth] for prompt in prompts if len(prompt) >= depth}
        assert sum(node.depth == depth for node in roots.nodes) == len(beginnings)
