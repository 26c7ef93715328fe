"""A plain aiohttp client and ``vllm serve`` as vLLM is installed: what people write first.

Nothing of Batchyard is in the server: neither its middleware nor the files of its engine
environment. The client keeps twice ``--max-num-seqs`` requests in flight; its time runs from the
first request to the last answer. The prefix cache is emptied before each file. Reads a line before
each job, to wait for its turn, and prints the seconds of it after it.
Arguments: the server's command and ``--``, a JSON file of jobs (way, file, output), engine options.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.comparators import one_window
from benchmarks.plain_client import empty_cache, posting, read_bodies, write_answers
from benchmarks.processors import FrontEnd

_STARTED_SECONDS: Final = 600.0


async def run(
    socket: Path,
    server: subprocess.Popen[bytes],
    jobs: list[tuple[str, str, str]],
    options: list[str],
) -> None:
    window = 2 * int(options[options.index("--max-num-seqs") + 1])
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        "http://engine", connector=connector, timeout=timeout
    ) as session:
        await _until_it_answers(session, server)
        for _, file, output in jobs:
            await asyncio.to_thread(sys.stdin.readline)
            await empty_cache(session)
            names, bodies = read_bodies(file)
            front_end, began = FrontEnd(server.pid), time.perf_counter()
            answers = await one_window(posting(session), bodies, window)
            seconds = time.perf_counter() - began
            print(f"SECONDS {seconds} {front_end.seconds()}", flush=True)
            write_answers(output, names, answers)


async def _until_it_answers(
    session: aiohttp.ClientSession, server: subprocess.Popen[bytes]
) -> None:
    async with asyncio.timeout(_STARTED_SECONDS):
        while server.poll() is None:
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    sys.exit("vllm serve has ended")


def main(server: list[str], jobs: list[tuple[str, str, str]], options: list[str]) -> None:
    """Start the server, answer the jobs, end it."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "vllm.sock"
        command = [*server, *options, "--uds", str(socket)]
        with (
            (Path(folder) / "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as process,
        ):
            try:
                asyncio.run(run(socket, process, jobs, options))
            finally:
                process.terminate()


if __name__ == "__main__":
    end = sys.argv.index("--")
    path, *words = sys.argv[end + 1 :]
    main(sys.argv[1:end], json.loads(Path(path).read_text()), words)
