"""Options of vLLM by the name of what they are for.

Each name stands for options of vLLM 0.32, which the operator could give as well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Literal

from batchyard.engine.vllm_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

Speculation = Literal["none", "ngram", "suffix"]

SPECULATIVE: Final[dict[Speculation, dict[str, str | int]]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 24},
}
"""What ``--speculative-config`` gets. 24 is the most that vLLM itself lets suffixes propose."""


def with_presets(
    options: Sequence[str], *, kv_offload: float = 0.0, speculation: Speculation = "none"
) -> list[str]:
    """The options with those of the presets.

    ``kv_offload``: GiB of main memory for what the KV cache on the GPU has no room for; 0: none.
    ``speculation``: where the next tokens of an answer are guessed from. Raises ``ValueError`` for
    an option that is given twice.
    """
    given = EngineOptions(options)
    words = list(options)
    if kv_offload:
        _refuse_both("kv_offload", "kv-offloading-size", given)
        words += ["--kv-offloading-size", f"{kv_offload:g}", "--kv-offloading-backend", "native"]
    if speculation != "none":
        _refuse_both("speculation", "speculative-config", given)
        words += ["--speculative-config", json.dumps(SPECULATIVE[speculation])]
    return words


def _refuse_both(preset: str, name: str, given: EngineOptions) -> None:
    if name in given:
        raise ValueError(f"{preset} sets --{name}, which the options have too: leave one out.")
