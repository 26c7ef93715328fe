"""The leader of an engine in a Slurm job: ``leader_in_slurm.py PORT FOLDER``.

It loses its node once, and prints what it has seen as its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.vllm.nodes.leader import Nodes
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import CPU
from batchyard.errors import EngineLost
from tests.unit.engine.test_nodes import Site
from tests.unit.engine.test_vllm_life import ask

if TYPE_CHECKING:
    from typing import Any


async def main(port: int, folder: Path) -> dict[str, Any]:
    site = Site(folder, folder / "python", port)
    engine = VllmEngine(
        "fake",
        ["--seed", str(port)],
        python=site.python,
        profile=CPU,
        log_path=folder / "leader.log",
        nodes=Nodes(1, port=port, secret_keys=[os.environ["BATCHYARD_SECRET_KEY"]]),
    )
    await engine.start()
    answers = [each.status for each in await ask(engine, "/echo")]
    asking = asyncio.create_task(ask(engine, "/hang"))
    await asyncio.sleep(1)
    began = time.monotonic()
    for process in site.processes():
        os.kill(process, signal.SIGKILL)
    try:
        await asking
    except EngineLost as error:
        loss, loss_seconds = str(error), time.monotonic() - began
    await engine.start()
    answers += [each.status for each in await ask(engine, "/echo")]
    await engine.stop()
    return {
        "answers": answers,
        "loss": loss,
        "loss_seconds": loss_seconds,
        "left": len(site.processes()),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))))  # noqa: T201
