"""What may be tuned of vLLM: which options there are to try, and how it gets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from batchyard.engine.tunable import axes_of, refused_kinds
from batchyard.engine.vllm import VllmEngine
from batchyard.engine.vllm_options import CPU, CUDA_LARGE, EngineOptions
from batchyard.settings import read_settings
from batchyard.tuning.points import DEFAULT, Kind
from blocks import VllmEngineBlock
from commands.engine_choice import EngineChoice

TWO = ("H100", "H100")
GUESSING = (("speculative-config", '{"method": "ngram"}'),)


def names(
    *options: str,
    weights: str = "org/model",
    devices: tuple[str, ...] = ("H100",),
    root: Path = Path("/no"),
) -> dict[str, tuple[str, ...]]:
    axes = axes_of(weights, EngineOptions(options), CUDA_LARGE, devices, root)
    return {axis.name: axis.values for axis in axes}


def test_steps_and_guesses_are_tried_unless_the_operator_has_set_them() -> None:
    assert set(names()) == {"max-num-batched-tokens", "speculative-config"}
    assert set(names("--max-num-batched-tokens=4096")) == {"speculative-config"}
    assert set(names("--speculative_config", "{}")) == {"max-num-batched-tokens"}


def test_an_option_of_a_config_file_counts_as_set(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-batched-tokens: 4096\n")
    assert set(names("--config", str(file))) == {"speculative-config"}


def test_a_model_with_experts_is_split_if_there_are_several_devices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 64}))
    weights = str(tmp_path)
    assert names(weights=weights, devices=TWO)["tensor-parallel-size"] == ("2",)
    assert "tensor-parallel-size" not in names(weights=weights)
    assert "tensor-parallel-size" not in names(devices=TWO)
    for option in ("--tp", "--data-parallel-size"):
        assert "tensor-parallel-size" not in names(option, "2", weights=weights, devices=TWO)


def test_suffixes_are_tried_where_their_package_is(tmp_path: Path) -> None:
    assert len(names(root=tmp_path)["speculative-config"]) == 1
    (tmp_path / "lib/python3.11/site-packages/arctic_inference").mkdir(parents=True)
    first, second = names(root=tmp_path)["speculative-config"]
    assert [json.loads(each)["method"] for each in (first, second)] == ["suffix", "ngram"]


def test_a_model_that_writes_no_answers_is_not_tuned() -> None:
    assert not names("--runner", "pooling")


def test_requests_that_vllm_refuses_with_guesses_are_known() -> None:
    biased = b'{"model": "m", "prompt": "a", "logit_bias": {"5": 1}}'
    assert refused_kinds(GUESSING, biased) == {Kind.GUESSES}
    assert refused_kinds(GUESSING, b'{"min_p": 0.1}') == {Kind.GUESSES}
    assert not refused_kinds(GUESSING, b'{"top_p": 0.1}')
    assert not refused_kinds(DEFAULT, biased)


def test_the_engine_gets_what_was_tuned_in_place_of_our_default(tmp_path: Path) -> None:
    engine = VllmEngine("m", ["--seed", "1"], python=Path("/python"), profile=CPU, tune=True)
    assert engine.tunable is engine
    engine.use((("max-num-batched-tokens", "8192"), *GUESSING))
    words = engine._command(tmp_path)
    assert words.count("--max-num-batched-tokens") == 1
    assert words[words.index("--max-num-batched-tokens") + 1] == "8192"
    assert words[words.index("--speculative-config") + 1] == '{"method": "ngram"}'
    engine.use(DEFAULT)
    assert "--speculative-config" not in engine._command(tmp_path)


def test_only_an_engine_that_is_to_be_tuned_is_and_no_live_one() -> None:
    assert VllmEngine("m", python=Path("/python")).tunable is None
    assert VllmEngine("m", python=Path("/python"), tune=True, live=True).tunable is None
    built = VllmEngineBlock(model="m", tune=True).build(python=Path("/python"))
    assert built.tunable is built
    with pytest.raises(ValidationError, match="live users would notice"):
        VllmEngineBlock(model="m", tune=True, live=True)


def test_a_command_line_tunes_an_engine_of_its_own_only(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o755)
    settings = read_settings(home=tmp_path, engine_python=python)
    assert EngineChoice.of("org/m", [], None, tune=True).make(settings, "m").tunable is not None
    assert EngineChoice.of("org/m", [], None).make(settings, "m").tunable is None
    with pytest.raises(typer.BadParameter, match="the server runs already"):
        EngineChoice.of("m", [], "http://127.0.0.1:1/v1", tune=True)
