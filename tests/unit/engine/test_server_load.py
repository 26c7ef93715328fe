"""From a server's metrics to what has happened there since the last look."""

from __future__ import annotations

import math

import pytest

from batchyard.engine.base import EngineAnswer, EngineRequest, NoAnswer
from batchyard.engine.kinds.vllm import GAUGES
from batchyard.engine.objective import Objective
from batchyard.engine.sharing.observation import NONE, Latencies
from batchyard.engine.sharing.request_size import expected_tokens, work_of
from batchyard.engine.sharing.server_load import Histogram, ServerLoad, ServerLook

GOAL = Objective(first_token_seconds=0.25, inter_token_seconds=0.06)


def counted(within_100: float, within_250: float, total: float) -> Histogram:
    return Histogram({0.1: within_100, 0.25: within_250, math.inf: total})


def load(first: Histogram, running: float = 5, waiting: float = 0) -> ServerLoad:
    return ServerLoad(running, waiting, first)


def test_a_page_of_vllm_is_read_all_ranks_together() -> None:
    def rank(number: int) -> str:
        labels = f'engine="{number}",model_name="m"'
        return "\n".join(
            [
                f"vllm:num_requests_running{{{labels}}} 3.0",
                f"vllm:num_requests_waiting{{{labels}}} 1.0",
                f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.25"}} 7.0',
                f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} 9.0',
                f"vllm:time_to_first_token_seconds_count{{{labels}}} 9.0",
                f'vllm:inter_token_latency_seconds_bucket{{le="0.05",{labels}}} 70.0',
                f'vllm:inter_token_latency_seconds_bucket{{le="+Inf",{labels}}} 1e+02',
            ]
        )

    assert GAUGES.load(rank(0) + "\n" + rank(1) + "\n") == ServerLoad(
        6.0, 2.0, Histogram({0.25: 14.0, math.inf: 18.0}), Histogram({0.05: 140.0, math.inf: 200.0})
    )


@pytest.mark.parametrize("page", ["", "<html>", 'vllm:num_requests_running{a="b"} 3.0'])
def test_another_page_says_nothing(page: str) -> None:
    assert GAUGES.load(page) is None


def test_buckets_that_are_none_are_left_out() -> None:
    page = (
        'vllm:num_requests_waiting{a="b"} 0.0\n'
        'vllm:time_to_first_token_seconds_bucket{le="1.0.0"} 7.0\n'
        'vllm:time_to_first_token_seconds_bucket{a="b"} 7.0\n'
        'vllm:time_to_first_token_seconds_bucket{le="0.5"} NaN\n'
    )
    assert GAUGES.load(page) == ServerLoad(0.0, 0.0)


def test_what_is_late_is_counted_from_one_look_to_the_next() -> None:
    look = ServerLook(GOAL)
    assert look.observation(load(counted(10, 20, 30)), 0).first_token == NONE
    seen = look.observation(load(counted(15, 28, 42)), 0)
    assert seen.first_token == Latencies(12, 4)
    assert seen.inter_token == NONE


def test_an_objective_between_two_bounds_is_kept_as_the_lower_one() -> None:
    look = ServerLook(Objective(first_token_seconds=0.2))
    look.observation(load(counted(0, 0, 0)), 0)
    assert look.observation(load(counted(5, 9, 10)), 0).first_token == Latencies(10, 5)


def test_below_all_bounds_everything_is_late() -> None:
    look = ServerLook(Objective(first_token_seconds=0.05))
    look.observation(load(counted(0, 0, 0)), 0)
    assert look.observation(load(counted(5, 9, 10)), 0).first_token == Latencies(10, 10)


def test_counters_that_begin_anew_are_another_server_or_its_restart() -> None:
    look = ServerLook(GOAL)
    look.observation(load(counted(100, 200, 300)), 0)
    assert look.observation(load(counted(1, 2, 3)), 0).first_token == NONE
    assert look.observation(load(counted(2, 3, 5)), 0).first_token == Latencies(2, 1)


def test_what_is_ours_is_not_live() -> None:
    look = ServerLook(None)
    assert look.observation(load(Histogram(), running=7, waiting=2), 5).live == 4
    assert look.observation(load(Histogram(), running=3), 5).live == 0


def test_numbers_without_bound_are_not_believed() -> None:
    look = ServerLook(GOAL)
    look.observation(load(counted(0, 0, 1e308), running=1e308), 0)
    seen = look.observation(load(counted(0, 0, math.inf), running=1.7e308, waiting=1.7e308), 0)
    assert seen.live == 1e9
    assert seen.first_token == NONE


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": "aaaaaaaa", "max_tokens": 16}', 10 + 16),
        (b'{"max_completion_tokens" : 300, "x": 1}', 39 / 4 + 300),
        (b'{"input": "a"}', 14 / 4 + 256),
        (b'{"max_tokens": 900000000, "x": 1}' + b" " * 200_000, 32_768 + 4_096),
    ],
)
def test_a_requests_tokens_are_guessed(body: bytes, tokens: float) -> None:
    assert expected_tokens(EngineRequest(1, "/v1/x", body, "r")) == tokens


@pytest.mark.parametrize(
    ("answer", "work"),
    [
        (EngineAnswer(1, 200, b'{"usage": {"prompt_tokens": 80, "completion_tokens": 5}}'), 15.0),
        (
            EngineAnswer(
                1,
                200,
                b'{"usage": {"prompt_tokens": 80, "completion_tokens": 5,'
                b' "prompt_tokens_details": {"cached_tokens": 64}}}',
            ),
            7.0,
        ),
        (
            EngineAnswer(
                1,
                200,
                b'{"usage": {"prompt_tokens": 8, "completion_tokens": 5,'
                b' "prompt_tokens_details": {"cached_tokens": 640}}}',
            ),
            5.0,
        ),
        (EngineAnswer(1, 200, b'{"data": []}'), 0.0),
        (EngineAnswer(1, 200, b"no JSON"), 0.0),
        (EngineAnswer(1, 400, b'{"usage": {"completion_tokens": 5}}'), None),
        (EngineAnswer(1, None, no_answer=NoAnswer.TIMEOUT), None),
    ],
)
def test_the_work_of_an_answer_is_what_it_says_that_it_used(
    answer: EngineAnswer, work: float | None
) -> None:
    assert work_of(answer) == work
