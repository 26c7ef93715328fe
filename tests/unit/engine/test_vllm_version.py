"""An engine is started only with a vLLM that works, and the message says which ones do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_version import vllm_version
from batchyard.errors import EngineStartFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PYTHON = sys.executable


@pytest.fixture
def having(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment of an interpreter that imports a vLLM of this version."""

    def make(version: str) -> dict[str, str]:
        package = tmp_path / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('importing it takes too long')")
        (package / "_version.py").write_text(
            f"__version__: str\n__version__ = version = {version!r}\n"
        )
        return {"PYTHONPATH": str(package.parent)}

    return make


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc2.dev7+gabcdef", "1.0.0"])
def test_a_version_that_works_is_named(having, version: str) -> None:
    assert vllm_version(PYTHON, having(version)) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2"])
def test_a_version_that_is_too_old_is_refused(having, version: str) -> None:
    with pytest.raises(EngineStartFailed, match=rf"has vLLM {version}.* needs vLLM 0\.32 or later"):
        vllm_version(PYTHON, having(version))


def test_an_environment_without_vllm_is_refused() -> None:
    with pytest.raises(EngineStartFailed, match=r"has no vLLM: install vLLM 0\.32 or later"):
        vllm_version(PYTHON, {})


def test_an_interpreter_that_does_not_say_is_left_to_the_start(tmp_path: Path) -> None:
    """Its own message is better than ours."""
    assert vllm_version(tmp_path / "none", {}) is None


def test_what_an_interpreter_prints_besides_need_not_be_utf_8(tmp_path: Path) -> None:
    """A warning may name a path in any encoding."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'caf\\351\\n' >&2\necho vllm-version 0.32.0\n")
    python.chmod(0o755)
    assert vllm_version(python, {}) == "0.32.0"


async def test_an_engine_asks_with_the_environment_of_its_block(having) -> None:
    """Nothing is launched for a version that does not work."""
    engine = VllmEngine("m", python=PYTHON, environment=having("0.10.0"))
    with pytest.raises(EngineStartFailed, match=r"has vLLM 0\.10\.0, which is too old"):
        await engine.start()
