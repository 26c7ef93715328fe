"""A live engine for tests: the product's own adapter, and a stub in place of ``vllm serve``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.engine.base import LivePromise

STUB = Path(__file__).parent / "machines" / "stub_vllm.py"


def stub_python(folder: Path) -> Path:
    """What stands in for the Python of an environment that has vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "python"
    words = shlex.join([sys.executable, "-u", str(STUB)])
    script.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit\nexec {words} "$@"\n')
    script.chmod(0o755)
    return script


def live_engine(
    folder: Path,
    model: str,
    *,
    max_num_seqs: int = 8,
    options: Sequence[str] = (),
    promise: LivePromise | None = None,
    adapters: Sequence[str] = (),
) -> VllmEngine:
    """Not started; its witness is in ``folder``."""
    weights = folder / "adapter"
    weights.mkdir(parents=True, exist_ok=True)
    (weights / "adapter_config.json").write_text('{"r": 8}')
    return VllmEngine(
        model,
        ["--max-num-seqs", str(max_num_seqs), *options],
        python=stub_python(folder),
        environment={"HOME": str(folder)},
        profile=CPU,
        live=True,
        promise=promise,
        adapters=dict.fromkeys(adapters, str(weights)),
    )


def witness(folder: Path) -> list[str]:
    """What the stub has written down: executions, and clients that left."""
    path = folder / "witness.log"
    return path.read_text().splitlines() if path.exists() else []
