"""The end of the ``batchyard up`` that the other tests here share; so named that it comes last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import openai
import pytest

from tests.services.prefect import engine_processes
from tests.services.up import running_yard
from tests.up.programs import WAIT_SECONDS, batch_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.up import Yard

pytestmark = pytest.mark.vllm


def test_ctrl_c_stops_everything(yard: Yard) -> None:
    """A warm engine, flow runs, workers, servers, in the end ``up`` itself."""
    assert yard.interrupt() == 0
    assert yard.is_over()


def test_sigkill_stops_everything(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine and the flow runs as well, which are in sessions of their own."""
    home = tmp_path_factory.mktemp("killed")
    with running_yard(home, VLLM_CPU_KVCACHE_SPACE="1") as yard:
        with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
            batch_id = batch_of(client, folder / "batchinput.jsonl")
            deadline = time.monotonic() + WAIT_SECONDS
            while client.batches.retrieve(batch_id).status != "completed":
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert engine_processes("tiny-chat")
        yard.process.kill()
        yard.process.wait()
        assert yard.is_over()
        assert not engine_processes("tiny-chat")
