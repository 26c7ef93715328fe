"""The engine adapter with a stand-in for vLLM that starts within a second."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import CPU

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that runs the stand-in, whatever module it is asked for.

    It does not say which version of vLLM it has.
    """
    script = tmp_path / "python"
    python = shlex.quote(sys.executable)
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit\nexec {python} -u {shlex.quote(str(FAKE))} "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture
async def make_engine(
    fake_python: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., VllmEngine]]:
    """``make_engine(*options, mode=…, **more)``; ``mode`` is how it misbehaves."""

    made: list[VllmEngine] = []

    def make(*options: str, mode: str = "", **more: object) -> VllmEngine:
        given = {"python": fake_python, "log_path": tmp_path / "engine.log", "profile": CPU, **more}
        environment = {"FAKE_VLLM": mode}
        engine = VllmEngine(
            "fake",
            options,
            environment=environment,
            **given,  # type: ignore[arg-type]
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.stop()
