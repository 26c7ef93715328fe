"""What we add to the engine's command line: defaults only, the operator's options win.

vLLM's own defaults are for live traffic. For batches it needs more sequences at once and more
tokens per step; the figures are those of vLLM's offline ``LLM`` class on the same device. An engine
that is live as well keeps vLLM's own steps, because each of them delays live answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from batchyard.engine.middleware.line_stream import LINE_PRIORITY_VARIABLE
from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GIB = 1 << 30
NO_MEDIA_DOMAIN = "none.invalid"
"""A host that cannot exist (RFC 2606): where no other may be fetched from, nothing is fetched."""
LEAST_STEP_TOKENS = 2048
"""vLLM's own step has at least so many tokens, on every device."""
PRIORITY_POLICY = "priority"
LINE_PRIORITY = 1
"""Of lines of batches in an engine that is live as well: live requests have 0, which goes first."""
_NOT_FOR_ENGINES = {"VIRTUAL_ENV", "VLLM_API_KEY", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
"""The last one: with it vLLM 0.32 exports traces of its start without having been told to, and by
gRPC. Where it is told to, by its own option, it sets the variable itself."""
STRUCTURED_BACKEND = "xgrammar"
"""What makes answers of a schema. Of its own accord vLLM 0.32 takes, for the engine's life, the
library that suits the first request, and then refuses with 500 what only another one has."""
_STRUCTURED = "structured-outputs-config"
_ONE_SERVER = (
    "data-parallel-external-lb",
    "data-parallel-hybrid-lb",
    "data-parallel-multi-port-external-lb",
    "data-parallel-rank",
    "data-parallel-start-rank",
    "enable-elastic-ep",
)
"""With each of them vLLM 0.32 has one API server, or decides by itself."""
_BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
_CORES_OF_A_SERVER: Final = 4
_MOST_SERVERS: Final = 4
_SHORT_NAMES: Final = {
    "tp": "tensor-parallel-size",
    "dp": "data-parallel-size",
    "pp": "pipeline-parallel-size",
    "pcp": "prefill-context-parallel-size",
}
_MULTIPLIERS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The engine's batch limits for one kind of device."""

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def is_cpu(self) -> bool:
        """Whether there is no GPU, however many requests run at a time."""
        return self.name == CPU.name


CPU = DeviceProfile("cpu", max_num_seqs=256, max_num_batched_tokens=4096)
CPU_ALONE = DeviceProfile("cpu", max_num_seqs=1, max_num_batched_tokens=4096)
"""For answers that do not depend on what runs beside them: nothing does."""
CUDA_SMALL = DeviceProfile("cuda", max_num_seqs=256, max_num_batched_tokens=8192)
CUDA_LARGE = DeviceProfile("cuda", max_num_seqs=1024, max_num_batched_tokens=16384)


def detect_profile(environment: Mapping[str, str]) -> DeviceProfile:
    """The profile of the first GPU that the engine will see, or of the CPU."""
    tool = shutil.which("nvidia-smi")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible == "":
        return CPU
    query = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    if visible is not None:
        query += ["--id", visible.split(",")[0].strip()]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        memory_mib, name = answer.stdout.splitlines()[0].split(",", 1)
        return profile_of_gpu(int(memory_mib), name)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return CPU if not Path("/dev/nvidiactl").exists() else CUDA_SMALL


def profile_of_gpu(memory_mib: int, name: str) -> DeviceProfile:
    """As vLLM 0.32 decides: 70 GiB and more is large, but not an A100, which it slows down."""
    is_large = memory_mib >= 70 * 1024 and "a100" not in name.lower()
    return CUDA_LARGE if is_large else CUDA_SMALL


def suited_to(profile: DeviceProfile, *, batch_invariant: bool) -> DeviceProfile:
    """The same device, for answers that may not depend on what runs beside them."""
    return CPU_ALONE if profile is CPU and batch_invariant else profile


class EngineOptions:
    """The operator's ``vllm serve`` options, unchanged, and the values that we must know."""

    def __init__(self, options: Sequence[str]) -> None:
        self.words = tuple(options)
        self._values = self._read_config_file() | _parse(self.words)

    def __contains__(self, name: str) -> bool:
        """Whether ``--name`` (or its ``--no-`` form) is given, in either spelling."""
        return name in self._values or f"no-{name}" in self._values

    def value(self, name: str) -> str | None:
        """The value of ``--name`` as it was given; None if it was not given."""
        return self._values.get(name)

    def values(self, name: str) -> list[str]:
        """The values of an option that takes several, from the words; the last mention holds."""
        values: list[str] = []
        for position, word in enumerate(self.words):
            given, separator, value = word.partition("=")
            if given.startswith("--") and _name(given) == name:
                following = takewhile(
                    lambda each: not each.startswith("-"), self.words[position + 1 :]
                )
                values = [value] if separator else list(following)
        return values

    def number(self, name: str) -> int | None:
        """The integer value, with vLLM's ``k`` and ``K`` multipliers; None if not given."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", self._values.get(name, ""))
        return int(float(match[1]) * _MULTIPLIERS.get(match[2], 1)) if match else None

    def object(self, name: str) -> dict[str, Any]:
        """The value as a JSON object; empty if it is none."""
        with contextlib.suppress(ValueError):
            value = json.loads(self._values.get(name) or "{}")
            if isinstance(value, dict):
                return value
        return {}

    def _read_config_file(self) -> dict[str, str]:
        """The options of ``--config FILE``, which those that we add must not overrule."""
        path = _parse(self.words).get("config")
        if not path:
            return {}
        try:
            config = yaml.safe_load(Path(path).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return {}  # vLLM says so better than we could
        return _parse(_words_of(config)) if isinstance(config, dict) else {}


def _words_of(config: Mapping[str, Any]) -> list[str]:
    """A config file as the command line that vLLM 0.32 makes of it."""
    words = []
    for key, value in config.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [f"--{key}", json.dumps(value, default=str)]
        else:
            words += [f"--{key}", str(value)]
    return words


def _parse(words: Sequence[str]) -> dict[str, str]:
    """Option name → its first value ("" for a flag)."""
    values: dict[str, str] = {}
    for position, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, separator, value = word.partition("=")
        if not separator and position + 1 < len(words):
            following = words[position + 1]
            value = "" if following.startswith("-") else following
        values[_name(name)] = value
    return values


def _name(option: str) -> str:
    name = option.lstrip("-").replace("_", "-")
    return _SHORT_NAMES.get(name, name)


def chunks_prefill(model: str, options: EngineOptions) -> bool:
    """Whether a long prompt may take several steps; if not, a step must hold a whole prompt.

    For such models vLLM raises its own default to the context length and refuses a smaller
    explicit value, so we give none.
    """
    pooling = {"runner": {"pooling"}, "convert": {"embed", "classify"}}
    is_pooling = any(options.value(name) in values for name, values in pooling.items())
    is_embedder = (Path(model) / "modules.json").exists()
    return not (is_pooling or is_embedder or "no-enable-chunked-prefill" in options)


def api_servers(options: EngineOptions, environment: Mapping[str, str], cores: int) -> int:
    """How many processes are to read requests and write answers for the one engine core.

    The operator's ``--api-server-count``; else one for each four of the machine's ``cores``, and
    four at most.
    """
    given = options.number("api-server-count")
    if given is not None:
        return max(1, given)
    # vLLM refuses adapters that are loaded while it runs, with more than one.
    changes_adapters = environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0") not in {"", "0"}
    if changes_adapters or any(name in options for name in _ONE_SERVER):
        return 1
    return max(1, min(_MOST_SERVERS, cores // _CORES_OF_A_SERVER))


def is_batch_invariant(environment: Mapping[str, str]) -> bool:
    """Whether vLLM is told that an answer must not depend on what runs beside it."""
    return environment.get(_BATCH_INVARIANT, "0") not in {"", "0"}


def added_options(
    model: str,
    weights: str,
    options: EngineOptions,
    profile: DeviceProfile,
    media_domains: Sequence[str] | None = None,
    *,
    live: bool = False,
) -> list[str]:
    """The options that we add because the operator has not given them.

    ``media_domains`` are the hosts whose media requests may name; None: any. ``live``: the engine
    takes live requests beside those of batches.
    """
    added: list[str] = []

    def default(name: str, *values: str) -> None:
        if name not in options:
            added.extend((f"--{name}", *values))

    if profile is CPU_ALONE:
        added += _alone_options(options)
    default("model", weights)
    default("served-model-name", model)
    default("max-num-seqs", str(profile.max_num_seqs))
    added += _structured_options(weights, options)
    if live:
        default("scheduling-policy", PRIORITY_POLICY)
        if (options.number("max-num-seqs") or 0) > LEAST_STEP_TOKENS:
            # vLLM wants at least a token per sequence.
            default("max-num-batched-tokens", str(options.number("max-num-seqs")))
    elif chunks_prefill(weights, options):
        sequences = options.number("max-num-seqs") or 0
        default("max-num-batched-tokens", str(max(profile.max_num_batched_tokens, sequences)))
    if not live:
        default("performance-mode", "throughput")
    if media_domains is not None:
        # vLLM takes an empty list for no limit.
        default("allowed-media-domains", *(media_domains or [NO_MEDIA_DOMAIN]))
    # `usage` says how many prompt tokens came from the cache, as OpenAI's does.
    default("enable-prompt-tokens-details")
    # Prompts never reach the log, and a line per request would be most of it.
    default("disable-uvicorn-access-log")
    if "enable-log-requests" not in options:
        added.append("--no-enable-log-requests")
    return added


def _alone_options(options: EngineOptions) -> list[str]:
    """One request at a time is ``CPU_ALONE``'s; what others have left in the cache is none's."""
    has_others = options.number("max-num-seqs") not in {None, 1}
    if has_others or ("enable-prefix-caching" in options and not _is_off(options)):
        raise SettingsError(
            "VLLM_BATCH_INVARIANT on a CPU is one request at a time without a prefix cache: leave "
            "out --max-num-seqs and --enable-prefix-caching."
        )
    return [] if _is_off(options) else ["--no-enable-prefix-caching"]


def _is_off(options: EngineOptions) -> bool:
    return options.value("no-enable-prefix-caching") is not None


def structured_backend(weights: str, options: EngineOptions) -> str:
    """The library that makes answers of a schema; ``auto``: vLLM chooses."""
    given = options.object(_STRUCTURED).get("backend")
    named = options.value(f"{_STRUCTURED}.backend") or (given if isinstance(given, str) else None)
    if named is not None:
        return named
    # Of Mistral's tokenizers some work with one library only, and vLLM knows which.
    tokenizer = options.value("tokenizer") or options.value("model") or weights
    is_mistral = tokenizer.startswith("mistralai/") or (Path(tokenizer) / "tekken.json").exists()
    is_mistral |= options.value("tokenizer-mode") not in {None, "auto", "hf"}
    return "auto" if is_mistral else STRUCTURED_BACKEND


def _structured_options(weights: str, options: EngineOptions) -> list[str]:
    """The option for the library, unless the operator names one."""
    backend, config = structured_backend(weights, options), options.object(_STRUCTURED)
    if backend == "auto" or "backend" in config or f"{_STRUCTURED}.backend" in options:
        return []
    if _STRUCTURED in options:
        # In vLLM 0.32 a part of it would replace all that the operator has given.
        return [f"--{_STRUCTURED}", json.dumps({**config, "backend": backend})]
    return [f"--{_STRUCTURED}.backend", backend]


def engine_environment(
    inherited: Mapping[str, str],
    own: Mapping[str, str],
    *,
    weights: str,
    options: EngineOptions,
    profile: DeviceProfile,
    python_path: Path,
    needs_hub: bool = False,
    follows_media_redirects: bool = True,
    live: bool = False,
) -> dict[str, str]:
    """The engine's environment: ours without our secrets and Python paths, ``own`` on top.

    ``needs_hub``: something besides ``weights`` and what ``options`` name is on the hub.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(("BATCHYARD_", "PREFECT_", "PYTHON"))
        and name not in _NOT_FOR_ENGINES
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if profile.is_cpu and "kv-cache-memory-bytes" not in options:
        # vLLM's own choice is nearly all of the machine's memory.
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(4, memory_bytes() // 4 // GIB)))
    if "otlp-traces-endpoint" in options:
        defaults["OTEL_SERVICE_NAME"] = "vllm"
    if is_path(weights) and not needs_hub and not names_hub_repository(options):
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not follows_media_redirects:
        # A redirect may lead from a host that is allowed to one that is not.
        environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    if live and options.value("scheduling-policy") in {None, PRIORITY_POLICY}:
        # Under another policy vLLM refuses requests with a priority.
        environment[LINE_PRIORITY_VARIABLE] = str(LINE_PRIORITY)
    environment = defaults | environment | dict(own)
    if profile is CPU_ALONE:
        # Its kernels are for GPUs: on a CPU, vLLM 0.32 ends at its start with a TypeError.
        environment.pop(_BATCH_INVARIANT, None)
    paths = [str(python_path), own.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Without this `python -m` would import from the working directory first.
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def names_hub_repository(options: EngineOptions) -> bool:
    """Whether an option besides the model may need the Hugging Face hub."""
    may_name = ("tokenizer", "hf-config-path", "lora-modules", "speculative-config", "config")
    values = (options.value(name) for name in may_name)
    return any(value and not (is_path(value) or _guesses_alone(value)) for value in values)


def _guesses_alone(value: str) -> bool:
    """Whether this is a ``--speculative-config`` that needs no model of its own."""
    return value.startswith("{") and '"method"' in value and '"model"' not in value


def is_path(value: str) -> bool:
    """Whether there is such a file or folder; a value may also be JSON, of any length."""
    with contextlib.suppress(OSError, ValueError):
        return Path(value).exists()
    return False


def is_missing_path(weights: str) -> bool:
    """Whether this can only be a path, and nothing is there: vLLM would ask the hub for it."""
    return weights.startswith(("/", "./", "../", "~")) and not is_path(weights)


def memory_bytes() -> int:
    """The physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
