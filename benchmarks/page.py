"""The page of benchmarks: measured sections between markers, everything else written by hand.

A section is between ``<!-- measured NAME: begin -->`` and ``<!-- measured NAME: end -->``.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from batchyard.engine.vllm.vllm_version import vllm_version
from benchmarks.timed import ENGINE_PYTHON

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "benchmarks.md"
GPU_PAGE = _DOCS / "benchmarks-gpu.md"
_MARKER = re.compile(r"<!-- measured ([a-z_]+): (begin|end) -->\n")


def sections(page: str) -> list[str]:
    """The names of the page's sections. Raises ValueError where a marker has no partner."""
    marks = [(match[1], match[2]) for match in _MARKER.finditer(page)]
    names = [name for name, which in marks if which == "begin"]
    if marks != [(name, which) for name in names for which in ("begin", "end")]:
        raise ValueError(f"markers that do not match: {marks}")
    return names


def rewritten(page: str, name: str, text: str) -> str:
    """The page with another text in one section. Raises ValueError if it has no such section."""
    begin, end = (f"<!-- measured {name}: {which} -->\n" for which in ("begin", "end"))
    if name not in sections(page):
        raise ValueError(f"the page has no section {name}")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}{text.rstrip()}\n{end}{after}"


def write(name: str, text: str, path: Path = PAGE) -> None:
    path.write_text(rewritten(path.read_text(), name, text))


def machine() -> str:
    """What everything but the page for GPUs was measured on."""
    name, cores = processor()
    vllm = vllm_version(ENGINE_PYTHON, os.environ) or "of an unknown version"
    return (
        f"On {name}, {cores} cores, no GPU, Python {platform.python_version()}, vLLM {vllm} (CPU)."
    )


def processor() -> tuple[str, int]:
    """Its name, and how many cores there are."""
    rows = Path("/proc/cpuinfo").read_text().splitlines()
    models = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return (models[0] if models else "an unknown processor"), len(models)
