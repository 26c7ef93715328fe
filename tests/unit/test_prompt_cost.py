"""What a token of a prompt costs an engine, by the time that answers take."""

from __future__ import annotations

import random

import pytest

from batchyard.runner.meters.prompt_cost import PromptCost

SEATS = 16
TOKEN_SECONDS = 0.02


def counted(weight: float, lengths: list[int], *, believed: float = 0.125) -> PromptCost:
    """Full seats, prompts of 100 tokens, and time that varies by a tenth.

    While an answer of ``n`` tokens is written, as many others begin as fit into its time.
    """
    chance = random.Random(1)
    cost = PromptCost(believed)
    for tokens in lengths:
        for _ in range(200):
            read = 100 * (1 + SEATS * tokens / chance.choice(lengths))
            seconds = TOKEN_SECONDS * (tokens + weight * read / SEATS) * chance.gauss(1.0, 0.1)
            cost.count(tokens, seconds, read=read, busy=SEATS)
    return cost


@pytest.mark.parametrize("weight", [0.0, 0.125, 1.0])
def test_the_weight_is_learned_where_short_and_long_answers_take_turns(weight: float) -> None:
    assert counted(weight, [16, 64, 512]).weight == pytest.approx(weight, abs=0.05)


def test_where_all_answers_are_alike_what_was_believed_is_kept() -> None:
    """Their seconds are nearly the same line over tokens and over prompts."""
    assert counted(0.3, [63, 64, 65], believed=0.3).weight == pytest.approx(0.3, abs=0.02)
    assert PromptCost(0.7).weight == 0.7


def test_an_engine_whose_time_makes_no_sense_leaves_what_was_believed() -> None:
    """Long answers that take less time than short ones."""
    cost = PromptCost(0.2)
    for tokens in (10, 1000) * 100:
        cost.count(tokens, 10.0 / tokens, read=10_000.0 / tokens, busy=SEATS)
    assert 0.0 <= cost.weight <= 4.0
    assert not PromptCost().is_measured
    assert cost.is_measured
