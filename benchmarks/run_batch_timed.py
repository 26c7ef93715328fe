"""Runs in the engine environment: vLLM's own run_batch on several files with one engine.

The engine is started once and its prefix cache emptied before each file; a file's time is that of
``run_batch`` alone, as its command calls it. Prints one JSON list, the seconds of each job.
Arguments: a JSON file of jobs (way, file, output), engine options.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.run_batch import make_arg_parser, run_batch
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def run(jobs: list[tuple[str, str, str]], options: list[str]) -> list[float]:
    """The seconds of each job."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["-i", "unused", "-o", "unused", *options])
    seconds = []
    async with build_async_engine_client(
        args, usage_context=UsageContext.OPENAI_BATCH_RUNNER
    ) as client:
        for _, args.input_file, args.output_file in jobs:
            await _empty_cache(client)
            began = time.perf_counter()
            await run_batch(client, args)
            seconds.append(time.perf_counter() - began)
    return seconds


async def _empty_cache(client: Any) -> None:
    # It cannot while the last blocks of the file before are still held.
    while not await client.reset_prefix_cache():  # noqa: ASYNC110 - it has no event for that
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    found = asyncio.run(run(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]))
    print("RESULT " + json.dumps(found), flush=True)
