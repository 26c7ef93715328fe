"""``python owner.py PYTHON LOG_PATH MODE [PORT KEY]``: an engine in a thread, until it is ended.

It says how far its start is. With a port and a key it leads one node.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.vllm.nodes.leader import Nodes
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import CPU

if TYPE_CHECKING:
    from batchyard.engine.base import StartProgress


async def own_engine(python: Path, log_path: Path, mode: str, *leads: str) -> None:
    nodes = Nodes(1, port=int(leads[0]), secret_keys=leads[1:]) if leads else None
    engine = VllmEngine(
        "fake",
        ["--seed", *leads[:1]] if leads else [],
        python=python,
        log_path=log_path,
        profile=CPU,
        environment={"FAKE_VLLM": mode},
        nodes=nodes,
    )

    def show(progress: StartProgress) -> None:
        running = engine._running
        if running is None:
            return  # it waits for its nodes
        sys.stdout.write(f"{running.process.session} {running.folder} {progress.message}\n")
        sys.stdout.flush()

    await engine.start(show)
    await asyncio.Event().wait()


if __name__ == "__main__":
    given = (Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    # Not in the main thread: a flow's engine is not started there either.
    thread = threading.Thread(target=lambda: asyncio.run(own_engine(*given)))
    thread.start()
    thread.join()
