"""What the core of an engine keeps to itself, and for how long."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from batchyard.engine.middleware import held_tokens
from batchyard.engine.middleware.held_tokens import HELD_SECONDS, KNOWN_FIELDS, HoldsTokens

Output = SimpleNamespace
Kind = Enum("Kind", ["FINAL_ONLY", "DELTA"])


class PlainScheduler:
    """What the class before it needs of vLLM's."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: list[str], _: str) -> list[Any]:
        return [self.requests.pop(each) for each in request_ids if each in self.requests]

    def update_from_output(self, outputs: list[Output]) -> dict[int, Any]:
        return {0: SimpleNamespace(outputs=outputs)}


class Held(HoldsTokens, PlainScheduler):
    """As in the engine."""


class Core:
    """A scheduler, the clock that it reads, and a step in which everything passes behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(held_tokens, "monotonic", lambda: self.now)
        self.scheduler = Held()
        self.step()

    def add(self, request_id: str, **params: Any) -> None:
        wanted = {"output_kind": Kind.FINAL_ONLY, "stop": [], "num_logprobs": None, **params}
        request = SimpleNamespace(
            request_id=request_id, resumable=False, sampling_params=SimpleNamespace(**wanted)
        )
        self.scheduler.add_request(request)

    def step(self, *outputs: Output) -> list[tuple[str, list[int]]]:
        """What leaves the core of what a step has produced."""
        found = self.scheduler.update_from_output(list(outputs))
        return [(each.request_id, each.new_token_ids) for each in found[0].outputs]


def made(request_id: str, *tokens: int, **more: Any) -> Output:
    nothing = dict.fromkeys(KNOWN_FIELDS)
    known = {"request_id": request_id, "new_token_ids": list(tokens), "num_nans_in_logits": 0}
    return Output(**nothing | known | more)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def test_the_last_token_brings_along_what_is_held(core: Core) -> None:
    core.add("a")
    assert core.step(made("a", 1, prefill_stats="first")) == [("a", [1])]
    assert core.step(made("a", 2)) == []
    assert core.step(made("a", 3, 4)) == []
    assert core.step(made("a", 5, finish_reason="stop")) == [("a", [2, 3, 4, 5])]


def test_nothing_is_held_for_longer_than_it_may_be(core: Core) -> None:
    core.add("a")
    core.add("b")
    assert core.step(made("a", 1), made("b", 7)) == []
    core.now += HELD_SECONDS
    assert core.step(made("a", 2)) == [("a", [1, 2])]
    assert core.step(made("a", 3), made("b", 8)) == []
    core.now += HELD_SECONDS
    assert core.step(made("b", 9)) == [("b", [7, 8, 9])]


@pytest.mark.parametrize(
    "params", [{"output_kind": Kind.DELTA}, {"stop": ["."]}, {"num_logprobs": 0}], ids=str
)
def test_what_somebody_looks_at_on_the_way_is_never_held(
    core: Core, params: dict[str, Any]
) -> None:
    core.add("a", **params)
    assert core.step(made("a", 1)) == [("a", [1])]


def test_an_embedding_and_a_request_that_goes_on_are_never_held(core: Core) -> None:
    core.scheduler.add_request(SimpleNamespace(request_id="e", sampling_params=None))
    params = SimpleNamespace(output_kind=Kind.FINAL_ONLY, stop=[], num_logprobs=None)
    more = SimpleNamespace(request_id="m", sampling_params=params, resumable=True)
    core.scheduler.add_request(more)
    assert core.step(made("e", pooling_output="vector"), made("m", 1)) == [("e", []), ("m", [1])]


@pytest.mark.parametrize("name", [each for each in KNOWN_FIELDS[2:] if each != "trace_headers"])
def test_an_output_with_more_than_tokens_is_never_held(core: Core, name: str) -> None:
    core.add("a")
    assert core.step(made("a", 1)) == []
    assert core.step(made("a", 2, **{name: 1})) == [("a", [1, 2])]


def test_the_headers_of_a_trace_are_read_at_the_end(core: Core) -> None:
    core.add("a")
    assert core.step(made("a", 1, trace_headers={"traceparent": "00"})) == []


@pytest.mark.parametrize("is_answered", [True, False])
def test_of_a_request_that_has_ended_nothing_is_left(core: Core, is_answered: bool) -> None:
    core.add("a")
    core.step(made("a", 1))
    if is_answered:
        core.step(made("a", 2, finish_reason="length"))
    else:
        assert [each.request_id for each in core.scheduler.finish_requests(["a", "b"], "x")] == [
            "a"
        ]
    assert (core.scheduler._held, core.scheduler._answered_whole) == ({}, set())
    core.add("a", stop=["."])
    assert core.step(made("a", 3)) == [("a", [3])]


class Config:
    """vLLM's, of its scheduler."""

    async_scheduling = True

    def __init__(self, named: str | None) -> None:
        self.scheduler_cls = named

    def get_scheduler_cls(self) -> type[PlainScheduler]:
        assert self.scheduler_cls is None
        return PlainScheduler


def scheduler_of(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], diffusion: str | None = None
) -> tuple[Any, Any]:
    """What is made in a core whose outputs have these fields, and the configuration."""
    engine, models = ModuleType("vllm.v1.engine"), ModuleType("vllm.v1.core.sched")
    engine.EngineCoreOutput = SimpleNamespace(__struct_fields__=fields)  # type: ignore[attr-defined]
    special = type("Special", (PlainScheduler,), {})
    models.diffusion_scheduler = SimpleNamespace(DiffusionAsyncScheduler=special)  # type: ignore[attr-defined]
    for module in (engine, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = SimpleNamespace(diffusion_config=diffusion, scheduler_config=Config("ours"))
    return held_tokens.scheduler(vllm_config=config, block_size=16), config


def test_it_is_the_scheduler_that_vllm_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    found, config = scheduler_of(monkeypatch, KNOWN_FIELDS)
    assert isinstance(found, HoldsTokens)
    assert isinstance(found, PlainScheduler)
    assert found.options == {"vllm_config": config, "block_size": 16}
    assert config.scheduler_config.scheduler_cls == "ours"


def test_a_model_that_needs_another_scheduler_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = scheduler_of(monkeypatch, KNOWN_FIELDS, "diffusion")
    assert [each.__name__ for each in type(found).__mro__[:3]] == [
        *("HeldTokens", "HoldsTokens", "Special")
    ]


def test_of_outputs_that_it_does_not_know_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = scheduler_of(monkeypatch, (*KNOWN_FIELDS, "new"))
    assert type(found) is PlainScheduler
