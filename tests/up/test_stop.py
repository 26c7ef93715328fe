"""The end of the ``batchyard up`` that the other tests here share; so named that it comes last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from tests.services.prefect import engine_processes
from tests.services.up import running_yard
from tests.up.programs import WAIT_SECONDS, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        # Other tests may have an engine for this model at the same time.
        ours = set(yard.process_ids())
        engines = {pid for pid in engine_processes("tiny-chat") if ours & set(_ancestors(pid))}
        assert engines
        yard.process.kill()
        yard.process.wait()
        assert yard.is_over()
        assert not engines & set(engine_processes("tiny-chat"))


def _ancestors(pid: int) -> Iterator[int]:
    """The process that has started it, and so on."""
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text()
        pid = int(status.partition("PPid:")[2].split()[0])
        yield pid
