"""Presets: which options of vLLM they are, and where they are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from batchyard.engine.presets import with_presets
from batchyard.engine.vllm import VllmEngine
from batchyard.engine.vllm_options import CPU, EngineOptions, names_hub_repository
from batchyard.errors import EngineStartFailed
from blocks import VllmEngineBlock


def test_without_a_preset_the_options_stay_as_they_are() -> None:
    assert with_presets(["--seed", "1"]) == ["--seed", "1"]


def test_kv_offload_is_a_size_and_a_backend() -> None:
    options = EngineOptions(with_presets(["--seed", "1"], kv_offload=40))
    assert options.value("seed") == "1"
    assert options.value("kv-offloading-size") == "40"
    assert options.value("kv-offloading-backend") == "native"


def test_guessing_needs_no_model_from_the_hub() -> None:
    options = EngineOptions(with_presets([], speculation="ngram"))
    config = json.loads(options.value("speculative-config") or "")
    assert config["method"] == "ngram"
    assert not names_hub_repository(options)
    draft = '{"method": "draft_model", "model": "org/draft"}'
    assert names_hub_repository(EngineOptions(["--speculative-config", draft]))


@pytest.mark.parametrize(
    ("options", "preset"),
    [
        ("--kv-offloading-size 3", {"kv_offload": 40}),
        ("--kv_offloading_size=3", {"kv_offload": 40}),
        ("--speculative-config {}", {"speculation": "suffix"}),
    ],
)
def test_an_option_that_a_preset_sets_must_not_be_given_too(
    options: str, preset: dict[str, object]
) -> None:
    with pytest.raises(ValidationError, match="leave one out"):
        VllmEngineBlock.model_validate({"model": "m", "options": options, **preset})


def test_a_block_gives_its_presets_to_the_engine(tmp_path: Path) -> None:
    block = VllmEngineBlock(model="m", options="--seed 1", kv_offload=1.5, speculation="suffix")
    words = block.build(python=Path("/python"))._command(tmp_path)
    assert words[words.index("--kv-offloading-size") + 1] == "1.5"
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "suffix"
    assert words[words.index("--seed") + 1] == "1"


def test_kv_offload_is_refused_where_there_is_no_gpu() -> None:
    engine = VllmEngine("m", with_presets([], kv_offload=4), python=Path("/no/python"), profile=CPU)
    with pytest.raises(EngineStartFailed, match="there is no GPU here"):
        asyncio.run(engine.start())
