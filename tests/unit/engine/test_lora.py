"""What vLLM is told of adapters, and what is wrong with those that it cannot load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from batchyard.engine.vllm.lora import lora_options
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import CPU, EngineOptions
from batchyard.errors import EngineStartFailed, SettingsError
from blocks import RemoteEngineBlock, VllmEngineBlock


def adapter(folder: Path, config: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def told(adapters: dict[str, str], *options: str, on_cpu: bool = False) -> dict[str, list[str]]:
    """The values of each option."""
    found: dict[str, list[str]] = {}
    for word in lora_options(adapters, EngineOptions(options), on_cpu=on_cpu):
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found


def test_an_engine_without_adapters_is_told_nothing() -> None:
    assert lora_options({}, EngineOptions(())) == []


def test_vllm_gets_the_adapters_and_as_much_room_as_the_largest_needs(tmp_path: Path) -> None:
    ranks = {"a": {"r": 4}, "b": {"r": 16}, "c": {"r": 8, "rank_pattern": {"q_proj": 40}}}
    adapters = {name: adapter(tmp_path / name, config) for name, config in ranks.items()}
    assert told(adapters) == {
        "--lora-modules": [
            json.dumps({"name": name, "path": path}) for name, path in adapters.items()
        ],
        "--enable-lora": [],
        "--max-loras": ["3"],
        "--max-cpu-loras": ["3"],
        "--max-lora-rank": ["64"],
    }


def test_more_adapters_than_run_at_once_stay_in_main_memory(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", {"r": 8})
    found = told({f"a{n}": path for n in range(9)})
    assert (found["--max-loras"], found["--max-cpu-loras"]) == (["4"], ["9"])


def test_the_operators_own_options_hold(tmp_path: Path) -> None:
    adapters = {"a": adapter(tmp_path / "a", {"r": 8})}
    options = ("--max-loras", "2", "--max_lora_rank=256", "--enable-lora")
    assert told(adapters, *options).keys() == {"--lora-modules", "--max-cpu-loras"}
    assert told(adapters, *options)["--max-cpu-loras"] == ["2"]


def test_on_a_cpu_a_place_stays_free_for_requests_of_the_model_itself(tmp_path: Path) -> None:
    """vLLM 0.32 gives them what is in the last one."""
    path = adapter(tmp_path / "a", {"r": 8})
    adapters = {f"a{n}": path for n in range(6)}
    assert told(adapters, on_cpu=True)["--max-loras"] == ["7"]
    modules = ("--enable-lora", "--lora-modules", "a=p", "b=p")
    assert told({}, *modules, on_cpu=True) == {"--max-loras": ["3"]}
    assert told({}, *modules) == told({}, on_cpu=True) == {}
    assert "--max-loras" not in told(adapters, "--max-loras", "7", on_cpu=True)
    with pytest.raises(SettingsError, match=r"--max-loras 6 would give wrong answers.* give 7"):
        told(adapters, "--max-loras", "6", on_cpu=True)


def test_of_an_adapter_on_the_hub_nothing_is_known_before_vllm_loads_it(tmp_path: Path) -> None:
    """Nor may vLLM be kept from asking the hub."""
    weights = tmp_path / "weights"
    weights.mkdir()
    here = adapter(tmp_path / "a", {"r": 8})
    assert "--max-lora-rank" not in told({"far": "org/far-adapter"})
    for adapters, is_offline in (({"a": here}, True), ({"a": here, "far": "org/far"}, False)):
        engine = VllmEngine(
            "m", python=Path("python"), weights=str(weights), profile=CPU, adapters=adapters
        )
        assert ("HF_HUB_OFFLINE" in engine._environment(tmp_path)) == is_offline
        assert engine.adapters == adapters.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no adapter_config.json in .*: is that a LoRA adapter"),
        ("[", "cannot be read"),
        ("[]", "has no rank: `r` must be a number from 1 to 512"),
        ('{"r": 0}', "has no rank"),
        ('{"r": 8, "rank_pattern": {"q": "x"}}', "has no rank"),
        ('{"r": 1024}', "has no rank"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_named(
    tmp_path: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(SettingsError, match=f"adapter law .*{message}"):
        told({"law": str(tmp_path)})


async def test_an_engine_does_not_start_without_the_folder_of_its_adapter(
    make_engine: Any, tmp_path: Path
) -> None:
    engine = make_engine(adapters={"law": str(tmp_path / "gone")})
    with pytest.raises(EngineStartFailed, match=r"adapter law .*gone, which is not a folder"):
        await engine.start()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": "--lora-modules a=b"}, "adapters sets --lora-modules, which the options have"),
        ({"options": "--no-enable-lora"}, "leave --no-enable-lora out"),
        ({"adapters": {"m": "/a"}}, "needs another name than its model"),
        ({"adapters": {"law": " "}}, "the adapter law needs a folder or a hub id"),
        ({"adapters": ["law"]}, "valid dict"),
    ],
)
def test_a_block_that_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    given = {"model": "m", "adapters": {"law": "/data/law"}} | fields
    with pytest.raises(ValidationError, match=message):
        VllmEngineBlock.model_validate(given)


def test_blocks_give_their_engines_the_names() -> None:
    vllm = VllmEngineBlock(model="m", adapters={"law": "/data/law"})
    assert vllm.build(python=Path("python")).adapters == {"law"}
    remote = RemoteEngineBlock(model="m", base_url="http://10.0.0.5", adapters=["law", "tone"])
    assert remote.build(None).adapters == {"law", "tone"}
    with pytest.raises(ValidationError, match="It is not a path"):
        RemoteEngineBlock(model="m", base_url="http://10.0.0.5", adapters=["/law"])
