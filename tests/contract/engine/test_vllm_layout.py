"""The installed vLLM is as our code expects it; where it is not, lines would only become slower."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchyard.cli.terminal.engine_words import split_options
from tests.contract.engine.conftest import ENGINE_PYTHON, require_vllm

pytestmark = pytest.mark.vllm

OUR_NAMES = {"-i": False, "--input-file": False, "-o": False, "--output-file": False}


@pytest.fixture(scope="module")
def layout() -> dict[str, Any]:
    require_vllm()
    script = Path(__file__).with_name("vllm_layout.py")
    done = subprocess.run(
        [ENGINE_PYTHON, script], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_lines_go_straight_to_the_handlers_of_vllms_application(layout: dict[str, Any]) -> None:
    """Each of them in the line's own task, which ends when the line is aborted."""
    ours = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    assert {path: layout["direct"].get(path) for path in ours} == dict.fromkeys(ours, True)


def test_the_server_gets_no_option_that_only_run_batch_has(layout: dict[str, Any]) -> None:
    """A server that gets one does not start."""
    for name in layout["run_batch"]:
        assert split_options([name, "1"], OUR_NAMES)[1] in ([], ["1"]), name
