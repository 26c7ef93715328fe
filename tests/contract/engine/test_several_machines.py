"""One real vLLM over two machines, data parallel: this network and one behind a cable.

The other machine runs `batchyard engine-node`, as by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import EngineLost
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.store import new_sealing_key
from blocks import VllmEngineBlock
from tests.contract.engine.conftest import (
    ENGINE_PYTHON,
    MODEL,
    TINY_CHAT,
    request,
    require_vllm,
    slow_body,
)
from tests.lifecycle import run_chunks, take_to_its_end
from tests.machines.network import FarNetwork, far_network
from tests.pages import block, replaced, words_of
from tests.patience import PATIENCE
from tests.services.ports import free_ports
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.control.batch_lease import LeasedBatch
    from batchyard.engine.base import EngineAnswer, EngineRequest
    from batchyard.engine.vllm.vllm import VllmEngine
    from batchyard.store import BatchRecord

pytestmark = pytest.mark.vllm

PAGE = "docs/deploy/several-machines-per-model.md"
KEY = new_sealing_key()
FOUND_SECONDS = 12.0
"""A machine that has lost its power is silent for ten."""


@dataclass
class OtherMachine:
    """It runs `batchyard engine-node` for one leader."""

    network: FarNetwork
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        line = block(PAGE, "node")
        line = replaced(line, {"10.0.0.1": self.network.ours, "29600": str(self.port)})
        words = [sys.executable, "-m", "batchyard.cli", *words_of(line)]
        environment = os.environ | {
            "BATCHYARD_HOME": str(self.folder / "other"),
            "BATCHYARD_SECRET_KEY": KEY,
            "BATCHYARD_ENGINE_PYTHON": str(ENGINE_PYTHON),
        }
        with (self.folder / "node.out").open("ab") as output:
            self.process = subprocess.Popen(
                [*self.network.enter, *words],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill_vllm(self) -> int:
        """SIGKILL to all that vLLM has there; how many processes that were."""
        found = self.vllm()
        for each in found:
            os.kill(each, signal.SIGKILL)
        return len(found)

    def vllm(self) -> list[int]:
        """The processes in its network that are of the engine's environment."""
        words = ["ip", "netns", "pids", self.network.name]
        pids = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in pids if "VLLM_HOST_IP=" in environment_of(pid)]

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=PATIENCE * 20)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherMachine]:
    require_vllm()
    with far_network() as network:
        machine = OtherMachine(network, tmp_path, free_ports(1)[0])
        machine.start()
        try:
            yield machine
        finally:
            if machine.process is not None and machine.process.poll() is None:
                machine.end()


@pytest.fixture
async def engine(other: OtherMachine, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    ports = free_ports(2)
    options = "--enforce-eager --dtype float32 --max-model-len 8192 --data-parallel-size 2"
    block = VllmEngineBlock(
        model=MODEL,
        weights=str(TINY_CHAT),
        options=f"{options} --master-port {ports[0]} --data-parallel-rpc-port {ports[1]}",
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        nodes=2,
        nodes_port=other.port,
    )
    engine = block.build(python=ENGINE_PYTHON, log_path=tmp_path / "leader.log", secret_keys=[KEY])
    yield engine
    await engine.stop()


async def test_a_batch_runs_on_both_machines_and_both_end_together(
    engine: VllmEngine, other: OtherMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    stop = engine.stop

    async def count_and_stop() -> None:
        if engine.metrics_socket is not None:
            shares[:] = successes(await engine.metrics())
        await stop()

    monkeypatch.setattr(engine, "stop", count_and_stop)
    async with yard_with(engine, tmp_path) as yard:
        lines = [line(number, max_tokens=100) for number in range(60)]
        batch = await finish(yard, await yard.create(lines))
        results = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
    assert min(shares) > 0, shares
    await nothing_left(other)


@pytest.mark.slow
async def test_the_loss_of_a_machine_in_the_middle_loses_and_repeats_no_line(
    engine: VllmEngine, other: OtherMachine, tmp_path: Path
) -> None:
    """Its processes are killed; the engine starts again on both by itself."""
    async with yard_with(engine, tmp_path) as yard:
        lines = [line(number, max_tokens=2000) for number in range(60)]
        batch_id = await yard.create(lines)
        async with asyncio.TaskGroup() as tasks:
            finishing = tasks.create_task(finish(yard, batch_id))
            await working(engine, finishing)
            assert other.kill_vllm()
            began, first = time.monotonic(), engine._running
            while engine._running is first:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
            found_seconds = time.monotonic() - began
        batch = finishing.result()
        results = await yard.results(batch.output_file_id)
    assert found_seconds < FOUND_SECONDS + 10, "the engine has ten seconds to stop"
    assert batch.status == "completed"
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
    await nothing_left(other)


@pytest.mark.slow
async def test_a_cable_that_is_pulled_out_is_noticed_on_both_sides_within_seconds(
    engine: VllmEngine, other: OtherMachine
) -> None:
    """As the loss of the other machine; neither vLLM would notice it."""
    await engine.start()
    asking = asyncio.create_task(ask(engine, slow_body()))
    await asyncio.sleep(1)
    began = time.monotonic()
    other.network.cut()
    with pytest.raises(EngineLost, match=r"the node .* is lost: there was no sign of life in 10 s"):
        await asking
    assert time.monotonic() - began < FOUND_SECONDS
    await nothing_left(other, seconds=FOUND_SECONDS + 10)
    assert other.end() == 128 + signal.SIGTERM


@asynccontextmanager
async def yard_with(engine: VllmEngine, folder: Path) -> AsyncIterator[Yard]:
    async def engine_for(_: str) -> VllmEngine:
        return engine

    settings = read_settings(home=folder / "home", chunk_requests=10, flush_seconds=0.2)
    async with open_services(settings, engine_for=engine_for) as services:
        yield Yard(services, folder, engine)  # type: ignore[arg-type] - a stub elsewhere


async def finish(yard: Yard, batch_id: str) -> BatchRecord:
    async def run(lease: LeasedBatch) -> int:
        return await run_chunks(yard.services, MODEL, batch_id=lease.id)

    return await take_to_its_end(yard.services, batch_id, run)


def line(number: int, *, max_tokens: int) -> dict[str, object]:
    more = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True}
    return chat_line(f"line-{number}", f"number {number}", **more)


def successes(metrics: str) -> list[float]:
    by_rank = [0.0, 0.0]
    pattern = r'^vllm:request_success_total\{engine="(\d)".*\} ([\d.e+]+)$'
    for rank, count in re.findall(pattern, metrics, re.MULTILINE):
        by_rank[int(rank)] += float(count)
    return by_rank


async def working(engine: VllmEngine, finishing: asyncio.Task[object]) -> None:
    """Return once both ranks have answered something."""
    shares = [0.0]
    while min(shares) == 0:
        assert not finishing.done(), finishing.result()
        await asyncio.sleep(0.1)
        if engine.metrics_socket is not None and engine.metrics_socket.exists():
            # It is not ready yet, or has ended.
            with contextlib.suppress(EngineLost):
                shares = successes(await engine.metrics())


async def nothing_left(other: OtherMachine, seconds: float = 20.0) -> None:
    """The other machine has ended its part, and waits for the leader."""
    async with asyncio.timeout(PATIENCE * seconds):
        while other.vllm():  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.1)
    assert other.process is not None
    assert other.process.poll() is None


async def ask(engine: VllmEngine, body: bytes) -> list[EngineAnswer]:
    async def requests() -> AsyncIterator[EngineRequest]:
        for tag in range(4):
            yield request(tag, body)

    return [answer async for answer in engine.stream(requests(), timeout_seconds=600)]


def environment_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
