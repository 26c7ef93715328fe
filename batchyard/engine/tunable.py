"""What of an engine of ours may be tuned: which options there are to try on its device."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from batchyard.engine.presets import SPECULATIVE
from batchyard.engine.vllm_options import CPU, chunks_prefill, device_names
from batchyard.tuning.points import Axis, Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from batchyard.engine.presets import Speculation
    from batchyard.engine.vllm_options import DeviceProfile, EngineOptions
    from batchyard.tuning.points import Point

_STEP_TOKENS: Final = "32768"
_STEP_TOKENS_ON_CPU: Final = "8192"
_PARALLEL: Final = ("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""In the configuration of a model that has several, by the family of the model."""
_REFUSED_WITH_GUESSES: Final = (b'"min_p"', b'"logit_bias"')
"""vLLM 0.32 refuses requests with these when it guesses tokens."""


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """What decides how fast an engine is, and what may be changed of it."""

    device: str
    version: str
    options: str
    """A hash of the weights and of the operator's own options."""
    axes: tuple[Axis, ...]


class Tunable(Protocol):
    """An engine that may be started with other options, as far as its operator has not set them."""

    async def facts(self) -> TuningFacts:
        """Raises :class:`~batchyard.errors.EngineStartFailed` where there is no engine to start."""
        ...

    def use(self, point: Point) -> None:
        """Start with these besides the engine's own, from the next start on."""
        ...

    def refused(self, body: bytes) -> Collection[Kind]:
        """The kinds of the options in use because of which the engine would refuse the request."""
        ...


def axes_of(
    weights: str, options: EngineOptions, profile: DeviceProfile, devices: Sequence[str], root: Path
) -> tuple[Axis, ...]:
    """What may be tried. ``devices`` of the engine; ``root`` of its Python environment.

    None for models that write no answers: what could be gained with them is not known.
    """
    if not chunks_prefill(weights, options):
        return ()
    axes = []
    if (
        len(devices) > 1
        and _has_experts(weights)
        and not any(each in options for each in _PARALLEL)
    ):
        axes.append(Axis("tensor-parallel-size", ("2",), Kind.SPLIT))
    if "max-num-batched-tokens" not in options:
        tokens = _STEP_TOKENS_ON_CPU if profile is CPU else _STEP_TOKENS
        axes.append(Axis("max-num-batched-tokens", (tokens,), Kind.STEPS))
    if "speculative-config" not in options:
        has_suffixes = any(root.glob("lib/python3*/site-packages/arctic_inference"))
        names: list[Speculation] = ["suffix", "ngram"] if has_suffixes else ["ngram"]
        values = tuple(json.dumps(SPECULATIVE[name]) for name in names)
        axes.append(Axis("speculative-config", values, Kind.GUESSES))
    return tuple(axes)


def refused_kinds(point: Point, body: bytes) -> frozenset[Kind]:
    """Because of which options in use vLLM would refuse a request that it answers without them.

    A request that only mentions such a parameter counts as one that has it.
    """
    guesses = any(name == "speculative-config" for name, _ in point)
    if guesses and any(name in body for name in _REFUSED_WITH_GUESSES):
        return frozenset({Kind.GUESSES})
    return frozenset()


def facts_of(
    weights: str,
    options: EngineOptions,
    profile: DeviceProfile,
    environment: Mapping[str, str],
    python: Path,
    *,
    version: str | None,
) -> TuningFacts:
    """Reads the configuration of the model, where it is on this machine; asks for the devices."""
    devices = () if profile is CPU else device_names(environment)
    own = json.dumps([weights, *options.words])
    return TuningFacts(
        device=", ".join(devices) or f"{profile.name} of {os.cpu_count()} cores",
        version=version or "unknown",
        options=hashlib.sha256(own.encode()).hexdigest()[:16],
        axes=axes_of(weights, options, profile, devices, python.parent.parent),
    )


def _has_experts(weights: str) -> bool:
    try:
        config: Any = json.loads((Path(weights) / "config.json").read_bytes())
        texts = (config, config.get("text_config") or {})
        return any(int(text.get(name) or 0) > 1 for text in texts for name in _EXPERTS)
    except (OSError, ValueError, AttributeError, TypeError):
        return False
