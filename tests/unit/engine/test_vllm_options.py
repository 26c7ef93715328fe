"""What we add to the engine's command line and environment, and what we leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import (
    CPU,
    CPU_ALONE,
    CUDA_LARGE,
    CUDA_SMALL,
    DeviceProfile,
    EngineOptions,
    added_options,
    api_servers,
    detect_profile,
    engine_environment,
    names_hub_repository,
    profile_of_gpu,
    structured_backend,
)
from batchyard.errors import SettingsError
from blocks import VllmEngineBlock

PYTHON = Path("/engine/bin/python")
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


def added(*options: str, weights: str = "org/m", profile: DeviceProfile = CUDA_LARGE) -> list[str]:
    return added_options("m", weights, EngineOptions(options), profile)


def test_a_bare_engine_gets_the_devices_batch_limits() -> None:
    """vLLM's server defaults are for live traffic."""
    assert added() == [
        *("--model", "org/m", "--served-model-name", "m"),
        *("--max-num-seqs", "1024", "--structured-outputs-config.backend", "xgrammar"),
        *("--max-num-batched-tokens", "16384"),
        *("--performance-mode", "throughput"),
        "--enable-prompt-tokens-details",
        *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]


@pytest.mark.parametrize(
    ("cores", "options", "environment", "servers"),
    [
        (2, [], {}, 1),
        (7, [], {}, 1),
        (8, [], {}, 2),
        (96, [], {}, 4),
        (2, ["--api-server-count", "3"], {}, 3),
        (96, ["--data-parallel-external-lb"], {}, 1),
        (96, [], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, 1),
    ],
)
def test_an_engine_has_an_api_server_for_each_four_cores_unless_its_options_decide(
    cores: int, options: list[str], environment: dict[str, str], servers: int
) -> None:
    assert api_servers(EngineOptions(options), environment, cores) == servers


@pytest.mark.parametrize(
    "option", ["--max-num-seqs=8", "--max_num_seqs=8", "--max-num-batched-tokens=1k"]
)
def test_what_the_operator_gave_is_not_given_again(option: str) -> None:
    """In either spelling; the operator's options win."""
    name = option.split("=", maxsplit=1)[0].replace("_", "-")

    assert name not in added(option)


def test_more_sequences_than_tokens_would_be_refused() -> None:
    """vLLM wants at least a token per sequence."""
    options = added("--max-num-seqs", "20000")

    assert options[options.index("--max-num-batched-tokens") + 1] == "20000"


@pytest.mark.parametrize(
    "options", [["--runner", "pooling"], ["--convert=embed"], ["--no-enable-chunked-prefill"]]
)
def test_no_token_limit_where_a_prompt_must_fit_in_one_step(options: list[str]) -> None:
    """vLLM refuses one that is smaller than the context, and knows better by itself."""
    assert "--max-num-batched-tokens" not in added(*options)


CONFIG = "--structured-outputs-config"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [f"{CONFIG}.backend", "xgrammar"]),
        ([f"{CONFIG}.backend=guidance"], []),
        (["--structured_outputs_config.backend", "auto"], []),
        ([CONFIG, '{"backend": "guidance"}'], []),
        # vLLM would drop what the operator gave for a part of it.
        ([CONFIG, '{"a": true}'], [CONFIG, '{"a": true, "backend": "xgrammar"}']),
        ([f"{CONFIG}.a", "true"], [f"{CONFIG}.backend", "xgrammar"]),
        (["--tokenizer-mode", "hf"], [f"{CONFIG}.backend", "xgrammar"]),
        (["--tokenizer-mode", "mistral"], []),
        (["--tokenizer", "mistralai/Small"], []),
    ],
)
def test_one_library_makes_answers_of_schemas_for_the_engines_life(
    options: list[str], expected: list[str]
) -> None:
    """That of vLLM's choice is the one that suits the first request."""
    words = added(*options)
    place = next((n for n, word in enumerate(words) if word.startswith(CONFIG)), len(words))
    assert words[place : place + 2] == expected


def test_a_folder_with_a_tokenizer_of_mistrals_leaves_the_library_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").touch()
    assert structured_backend(str(tmp_path), EngineOptions(())) == "auto"


def test_logging_of_requests_is_the_operators_own_decision() -> None:
    """Off unless asked for."""
    assert "--no-enable-log-requests" not in added("--enable-log-requests")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("served-model-name: 'a # b'", "served-model-name", "a # b"),
        ("served-model-name:\n  - first\n  - second", "served-model-name", "first"),
        ("served-model-name: [first, second]", "served-model-name", "first"),
        ("max_num_seqs: 64  # few", "max-num-seqs", "64"),
        ("enable-chunked-prefill: false", "no-enable-chunked-prefill", ""),
        ("speculative-config:\n  model: org/draft", "speculative-config", '{"model": "org/draft"}'),
        ("speculative-config:\n  max-num-seqs: 1", "max-num-seqs", None),
        ("trust-remote-code: true", "trust-remote-code", ""),
        ("served-model-name: []", "served-model-name", None),
        ("just words", "just words", None),
        ("{", "{", None),
        ("", "model", None),
    ],
)
def test_a_config_file_is_read_as_vllm_reads_it(
    tmp_path: Path, text: str, name: str, value: str | None
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(text)
    assert EngineOptions(["--config", str(config)]).value(name) == value


def test_a_config_file_is_not_overruled(tmp_path: Path) -> None:
    """An option would win over it, so we give none that it has."""
    config = tmp_path / "engine.yaml"
    config.write_text("# ours\nmax-num-seqs: 64  # small\nserved_model_name: 'm'\n")
    engine = VllmEngine("m", ["--config", str(config)], python=PYTHON, profile=CPU)

    options = added("--config", str(config))

    assert engine.max_num_seqs == 64
    assert not {"--max-num-seqs", "--served-model-name"} & set(options)


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ([], 256),
        (["--max-num-seqs", "48"], 48),
        (["--max-num-seqs=1k"], 1000),
        (["-dp", "2"], 512),
        (["--max-num-seqs", "48", "--data-parallel-size", "2"], 96),
    ],
)
def test_the_engine_knows_how_much_it_runs_at_once(options: list[str], sequences: int) -> None:
    """The operator's number or the device's, for every data-parallel rank."""
    engine = VllmEngine("m", options, python=PYTHON, profile=CPU)

    assert engine.max_num_seqs == sequences


@pytest.mark.parametrize(
    ("memory_mib", "name", "profile"),
    [
        (81_559, " NVIDIA H100 80GB HBM3", CUDA_LARGE),
        (143_771, " NVIDIA H200", CUDA_LARGE),
        (81_920, " NVIDIA A100-SXM4-80GB", CUDA_SMALL),
        (23_034, " NVIDIA L4", CUDA_SMALL),
    ],
)
def test_a_gpus_profile_follows_its_memory(
    memory_mib: int, name: str, profile: DeviceProfile
) -> None:
    """As in vLLM: an A100 gets the small one in spite of its memory."""
    assert profile_of_gpu(memory_mib, name) is profile


def test_the_first_visible_gpu_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``nvidia-smi`` is asked about the one that the engine will see."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *"--id 1"*) echo "143771, H200";; *) exit 1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert detect_profile({"CUDA_VISIBLE_DEVICES": "1,2"}) is CUDA_LARGE
    assert detect_profile({"CUDA_VISIBLE_DEVICES": ""}) is CPU


def test_where_clients_media_come_from_is_said_to_the_engine() -> None:
    """As its own limit, which holds for every way of writing a URL; local files are never on."""
    engine = EngineOptions(())

    def media(domains: list[str] | None, options: EngineOptions = engine) -> list[str]:
        words = added_options("m", "org/m", options, CPU, domains)
        found = [at for at, word in enumerate(words) if word == "--allowed-media-domains"]
        assert "--allowed-local-media-path" not in words
        following = words[found[0] + 1 :] if found else []
        return following[: next(n for n, word in enumerate([*following, "-"]) if word[0] == "-")]

    assert media(["a.example", "b.example"]) == ["a.example", "b.example"]
    assert media([]) == ["none.invalid"]
    assert media(None) == []
    assert media([], EngineOptions(["--allowed-media-domains", "c.example"])) == []


def test_an_engine_of_clients_follows_no_redirect() -> None:
    """Unless its block says so; the worker's own environment does not."""
    name = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"

    def value(own: dict[str, str], **inherited: str) -> str | None:
        return engine_environment(
            inherited,
            own,
            weights="org/m",
            options=EngineOptions(()),
            profile=CPU,
            python_path=Path("/middleware"),
            follows_media_redirects=False,
        ).get(name)

    assert value({}) == value({}, **{name: "1"}) == "0"
    assert value({name: "1"}) == "1"
    assert name not in environment("org/m")


def test_an_engine_exports_traces_only_where_its_options_say_so() -> None:
    """With the variable, the processes below its server would do so on their own."""
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    set_for_us = {name: "http://collector:4318/v1/traces", "OTEL_TRACES_SAMPLER": "always_off"}

    without = environment("org/m", **set_for_us)
    with_option = environment("org/m", "--otlp-traces-endpoint", "http://c:4317", **set_for_us)

    assert name not in without
    assert "OTEL_SERVICE_NAME" not in without
    assert with_option["OTEL_SERVICE_NAME"] == "vllm"
    assert with_option["OTEL_TRACES_SAMPLER"] == "always_off"


def environment(
    weights: str, *options: str, own: dict[str, str] | None = None, **inherited: str
) -> dict[str, str]:
    return engine_environment(
        inherited,
        own or {},
        weights=weights,
        options=EngineOptions(options),
        profile=CPU,
        python_path=Path("/middleware"),
    )


def test_a_local_model_never_goes_out(tmp_path: Path) -> None:
    """The hub is off for a folder, on for a repository, and on if another option names one."""
    assert environment(str(tmp_path))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment("org/model")
    assert "HF_HUB_OFFLINE" not in environment(str(tmp_path), "--tokenizer", "org/tokenizer")


def test_guessing_from_the_prompt_needs_no_model_from_the_hub() -> None:
    for config, is_on_hub in (
        ('{"method": "ngram", "num_speculative_tokens": 4}', False),
        ('{"method": "draft_model", "model": "org/draft"}', True),
    ):
        assert names_hub_repository(EngineOptions(["--speculative-config", config])) is is_on_hub


def test_what_the_operator_set_stays_set() -> None:
    """Our values are defaults; the engine's own environment wins over the inherited one."""
    got = environment(
        "org/m",
        own={"VLLM_CPU_KVCACHE_SPACE": "9"},
        VLLM_CPU_KVCACHE_SPACE="7",
        VLLM_NO_USAGE_STATS="0",
        HF_TOKEN="t",
    )

    assert got["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert got["VLLM_NO_USAGE_STATS"] == "0"
    assert got["HF_TOKEN"] == "t"


def test_a_live_engine_keeps_vllms_own_steps_and_puts_lines_behind() -> None:
    live = added_options("m", "org/m", EngineOptions(()), CUDA_LARGE, live=True)
    assert live[4:6] == ["--max-num-seqs", "1024"]
    assert live[8:10] == ["--scheduling-policy", "priority"]
    assert not {"--performance-mode", "--max-num-batched-tokens"} & set(live)


def test_lines_have_a_priority_only_where_vllm_takes_one() -> None:
    """Under first come, first served, it refuses a request with a priority."""

    def priority(*options: str, live: bool = True) -> str | None:
        return engine_environment(
            {"BATCHYARD_LINE_PRIORITY": "7"},
            {},
            weights="org/m",
            options=EngineOptions(options),
            profile=CPU,
            python_path=Path("/middleware"),
            live=live,
        ).get("BATCHYARD_LINE_PRIORITY")

    assert priority() == priority("--scheduling-policy", "priority") == "1"
    assert priority("--scheduling-policy=fcfs") is priority(live=False) is None


def test_on_a_cpu_answers_that_must_not_depend_on_others_are_made_one_at_a_time() -> None:
    engine = VllmEngine("m", python=PYTHON, profile=CPU, environment=INVARIANT)
    assert engine.is_batch_invariant
    assert engine.max_num_seqs == 1
    words = added(profile=CPU_ALONE)
    assert words[words.index("--max-num-seqs") + 1] == "1"
    assert "--no-enable-prefix-caching" in words


@pytest.mark.parametrize(
    "options", [["--max-num-seqs", "8"], ["--enable-prefix-caching"], ["--enable_prefix_caching"]]
)
def test_an_option_against_that_is_refused(options: list[str]) -> None:
    with pytest.raises(SettingsError, match="leave out --max-num-seqs"):
        added(*options, profile=CPU_ALONE)


@pytest.mark.parametrize("options", [["--max-num-seqs=1"], ["--no-enable-prefix-caching"]])
def test_an_option_that_says_the_same_is_kept(options: list[str]) -> None:
    words = [*options, *added(*options, profile=CPU_ALONE)]
    assert " ".join(words).count("max-num-seqs") == 1
    assert words.count("--no-enable-prefix-caching") == 1


def test_a_gpu_has_kernels_for_it_and_keeps_its_batches() -> None:
    engine = VllmEngine("m", python=PYTHON, profile=CUDA_LARGE, environment=INVARIANT)
    assert engine.is_batch_invariant
    assert engine.max_num_seqs == CUDA_LARGE.max_num_seqs


@pytest.mark.parametrize(("profile", "is_there"), [(CPU_ALONE, False), (CUDA_LARGE, True)])
def test_vllm_is_told_where_it_has_kernels_for_it(
    profile: DeviceProfile, *, is_there: bool
) -> None:
    environment = engine_environment(
        {}, INVARIANT, weights="m", options=EngineOptions([]), profile=profile, python_path=PYTHON
    )
    assert ("VLLM_BATCH_INVARIANT" in environment) is is_there


@pytest.mark.parametrize("value", ["", "0"])
def test_vllms_variable_can_be_off(value: str) -> None:
    environment = {"VLLM_BATCH_INVARIANT": value}
    engine = VllmEngine("m", python=PYTHON, profile=CPU, environment=environment)
    assert not engine.is_batch_invariant


def test_a_block_asks_for_it_by_a_field_of_its_own() -> None:
    assert VllmEngineBlock(model="m", batch_invariant=True).build(python=PYTHON).is_batch_invariant
    assert not VllmEngineBlock(model="m").build(python=PYTHON).is_batch_invariant
