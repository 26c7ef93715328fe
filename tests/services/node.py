"""Packages from npm, of the versions and hashes in a package-lock.json: OpenAI's SDK for Node.

They are installed once, into a cache folder of the project; ``make clean`` removes it. Without
Node.js, or without a way to npm's registry, tests that need them are skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LISTS = Path(__file__).parents[1] / "api" / "node"
CACHE = Path(__file__).parents[2] / ".node_cache"

_INSTALL_SECONDS = 120
_LEAST_MAJOR = 20
_FILES = ("package.json", "package-lock.json")


def node_folder() -> Path:
    """A folder with the SDK in ``node_modules``. Skips where there is none to be had."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not here: install node and npm.")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").partition(".")[0]) < _LEAST_MAJOR:
        pytest.skip(f"openai-node needs Node.js {_LEAST_MAJOR}, and this is {version.strip()}.")
    return npm_folder(LISTS)


def npm_folder(lists: Path, *options: str) -> Path:
    """A folder with the packages of the lists in ``node_modules``. Skips where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here.")
    content = b"".join((lists / name).read_bytes() for name in _FILES)
    folder = CACHE / hashlib.sha256(content).hexdigest()[:16]
    if not folder.exists():
        _install(npm, lists, folder, options)
    return folder


def run_node(
    program: str, *, cwd: Path, environment: Mapping[str, str], timeout_seconds: float = 120
) -> str:
    """What an ES module prints that has the SDK; its files lie in ``cwd``."""
    folder = node_folder()
    script = cwd / "program.mjs"
    script.write_text(program)
    # An import is looked up from the module's own folder upwards, and nowhere else.
    modules = cwd / "node_modules"
    if not modules.exists():
        modules.symlink_to(folder / "node_modules")
    done = subprocess.run(
        ["node", str(script)],
        cwd=cwd,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _install(npm: str, lists: Path, folder: Path, options: Sequence[str]) -> None:
    """Whole or not at all: two sessions may do it at the same time."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        for name in _FILES:
            shutil.copy(lists / name, draft)
        words = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
        words += options
        try:
            done = subprocess.run(
                words,
                cwd=draft,
                capture_output=True,
                text=True,
                timeout=_INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm's registry does not answer, so its packages are missing.")
        if done.returncode:
            pytest.skip(f"npm cannot install {lists.name}: {done.stderr.strip()[-500:]}")
        with contextlib.suppress(OSError):  # another session was faster
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
