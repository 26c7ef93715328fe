"""The simulated prefix cache, against cases by hand and a cache kept block by block."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.plan.cache import (
    CacheShape,
    PrefixTree,
    SimulatedEngine,
    ceiling,
    prefix_tree,
    simulate,
)

if TYPE_CHECKING:
    import random


def tree_of(prompts: list[bytes], block_tokens: int) -> PrefixTree:
    """A token is a byte; the prompts are sorted."""
    # Its name is misleading: it compares characters.
    commonprefix = os.path.commonprefix
    shared = [0] + [len(commonprefix(pair)) for pair in itertools.pairwise(prompts)]
    return prefix_tree(
        np.array([*map(len, prompts)]), np.array(shared[: len(prompts)]), block_tokens
    )


def hits(prompts: list[bytes], order: list[int], shape: CacheShape, output: int = 0) -> list[int]:
    """The cached tokens of each prompt, in the order of execution."""
    engine = SimulatedEngine(tree_of(prompts, shape.block_tokens), shape)
    return [engine.run(prompt, len(prompts[prompt]), output) for prompt in order]


A, B, C = b"aaaabbbbcccc1", b"aaaabbbbdddd1", b"aaaaeeeeffff1"


def test_a_block_is_shared_if_everything_before_it_is_the_same() -> None:
    tree = tree_of([A, B, C], 4)
    paths = [[tree.blocks[node] for node in tree.path(prompt)] for prompt in range(3)]
    assert paths == [[1, 1, 1], [1, 1, 1], [2, 1]]
    assert sum(tree.blocks) == 6
    assert tree.path(0)[1:] == tree.path(1)[1:]
    assert tree.path(1)[-1] == tree.path(2)[-1]


def test_the_ceiling_is_what_an_endless_cache_finds() -> None:
    reuse = ceiling(tree_of([A, B, C], 4), np.array([13, 13, 13]), 4)
    assert (reuse.cached_tokens, reuse.prompt_tokens) == (8 + 4, 39)
    assert hits([A, B, C], [0, 1, 2], CacheShape(100, 4)) == [0, 8, 4]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert hits([b"aaaabbbb"] * 2, [0, 1], CacheShape(100, 4)) == [0, 4]


def test_only_full_blocks_are_found_again() -> None:
    assert hits([b"aaaabb", b"aaaabbc"], [0, 1], CacheShape(100, 4)) == [0, 4]


def test_what_was_used_longest_ago_is_forgotten_first_from_its_end() -> None:
    """Seven blocks, four to a prompt: the second takes three blank ones and one of the first."""
    prompts = [b"aaaabbbbcccc1", b"xxxxyyyyzzzz1"]
    one_at_a_time = CacheShape(7, 4, sequences=1)
    assert hits(prompts, [0, 1, 0], one_at_a_time) == [0, 0, 12]
    assert hits(prompts, [0, 1, 0], CacheShape(6, 4, sequences=1)) == [0, 0, 8]
    assert hits(prompts, [0, 1, 0], CacheShape(4, 4, sequences=1)) == [0, 0, 0]


def test_what_is_used_again_is_kept_longer() -> None:
    prompts = [b"aaaab", b"ccccd", b"eeeef"]
    shape = CacheShape(3, 4, sequences=1)
    assert hits(prompts, [0, 1, 0, 2, 0, 1], shape) == [0, 0, 4, 0, 4, 0]


@pytest.mark.parametrize(("blocks", "found"), [(6, 0), (9, 8)])
def test_running_requests_hold_their_blocks(blocks: int, found: int) -> None:
    """Two at a time, three blocks each: the third finds room when the first has ended."""
    prompts = [b"aaaabbbb1", b"ccccdddd1", b"eeeeffff1"]
    shape = CacheShape(blocks, 4, sequences=2)
    assert hits(prompts, [0, 1, 2, 0], shape, output=3)[3] == found


def test_one_that_waits_for_blocks_finds_what_the_one_before_has_left() -> None:
    prompts = [b"aaaabbbb1", b"aaaabbbb2"]
    assert hits(prompts, [0, 1], CacheShape(3, 4, sequences=8), output=3) == [0, 8]


def test_answers_take_room_too() -> None:
    prompts = [b"aaaab", b"ccccd"]
    shape = CacheShape(8, 4, sequences=1)
    assert hits(prompts, [0, 1, 0], shape, output=3) == [0, 0, 4]
    assert hits(prompts, [0, 1, 0], shape, output=27) == [0, 0, 0]


def test_a_prompt_that_no_engine_could_hold_leaves_the_cache_alone() -> None:
    prompts = [b"aaaab", b"c" * 100]
    assert hits(prompts, [0, 1, 0], CacheShape(4, 4)) == [0, 0, 4]


def test_steps_are_those_of_the_longest_in_each_round() -> None:
    prompts = [b"%d" % number for number in range(4)]
    tree = tree_of(prompts, 4)
    engine = simulate(tree, range(4), [1] * 4, [10] * 4, CacheShape(100, 4, sequences=2))
    assert engine.steps == pytest.approx(20, abs=0.1)


def by_the_block(prompts: list[bytes], order: list[int], shape: CacheShape) -> list[int]:
    """One request at a time, no answers: the queue of free blocks as a list."""
    size = shape.block_tokens
    free: list[bytes | None] = [None] * shape.blocks
    found = []
    for prompt in (prompts[number] for number in order):
        full = [prompt[: size * (n + 1)] for n in range((len(prompt) - 1) // size)]
        cached = list(itertools.takewhile(set(free).__contains__, full))
        free = [block for block in free if block not in cached]
        needed = math.ceil(len(prompt) / size) - len(cached)
        free = [None] * (needed - len(full) + len(cached)) + free[needed:] + full[::-1]
        found.append(len(cached) * size)
    return found


@given(
    st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.integers(6, 14),
)
def test_whole_runs_of_blocks_behave_as_single_blocks_do(
    texts: list[str], rng: random.Random, blocks: int
) -> None:
    prompts = sorted(text.encode() for text in texts)
    order = [rng.randrange(len(prompts)) for _ in range(60)]
    shape = CacheShape(blocks, 2, sequences=1)
    assert hits(prompts, order, shape) == by_the_block(prompts, order, shape)


@given(
    st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
    st.integers(10, 40),
    st.integers(1, 6),
)
def test_no_order_finds_more_than_the_ceiling(
    texts: list[str], rng: random.Random, blocks: int, sequences: int
) -> None:
    prompts = sorted(text.encode() for text in texts)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    found = sum(hits(prompts, order, CacheShape(blocks, 2, sequences), output=rng.randrange(6)))
    tokens = np.array([*map(len, prompts)])
    assert found <= ceiling(tree_of(prompts, 2), tokens, 2).cached_tokens
    if blocks >= 10 * len(prompts):
        assert found == ceiling(tree_of(prompts, 2), tokens, 2).cached_tokens
