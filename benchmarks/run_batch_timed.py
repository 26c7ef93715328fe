"""Runs in the engine environment: vLLM's own run_batch on several files with one engine.

The engine is started once and its prefix cache emptied before each file; a file's time is that of
``run_batch`` alone, as its command calls it. A way that ends in ``.py`` is the file with the
``run_batch`` of vLLM 0.33, which runs here on this release's engine: its time includes that it
reads the whole file beforehand, to check it. Reads a line before each job, to wait for its turn,
and prints the seconds of it after it. Arguments: a JSON file of jobs (way, file, output), engine
options.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.launchers import run_batch as of_this_release
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common import cli_args
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers import cli_args

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Way = Callable[[Any, str, str], Awaitable[None]]


async def run(jobs: list[tuple[str, str, str]], options: list[str]) -> None:
    ways = {way: _way(way, options) for way, _, _ in jobs}
    async with build_async_engine_client(
        _arguments(of_this_release, options), usage_context=UsageContext.OPENAI_BATCH_RUNNER
    ) as client:
        for way, file, output in jobs:
            await asyncio.to_thread(sys.stdin.readline)
            await _empty_cache(client)
            began, used = time.perf_counter(), time.process_time()
            await ways[way](client, file, output)
            seconds, used = time.perf_counter() - began, time.process_time() - used
            # Its own process is the front end.
            print(f"SECONDS {seconds} {used}", flush=True)


def _way(way: str, options: list[str]) -> Way:
    """What answers the requests of one path into another one."""
    if way.endswith(".py"):
        return _of_0_33(_module_of(Path(way)), options)
    args = _arguments(of_this_release, options)

    async def answer(client: Any, file: str, output: str) -> None:
        args.input_file, args.output_file = file, output
        await of_this_release.run_batch(client, args)

    return answer


def _of_0_33(module: Any, options: list[str]) -> Way:
    args = _arguments(module, options)

    async def answer(client: Any, file: str, output: str) -> None:
        args.input_file, args.output_file = file, output
        async with module.open_batch_input(file, None) as lines:
            requests = module.validate_batch(lines)
            lines.seek(0)
            await module.run_batch(client, args, lines, requests)

    return answer


def _module_of(path: Path) -> Any:
    """A release's file, as a neighbour of this release's: what it needs of it has moved only."""
    sys.modules["vllm.entrypoints.common.cli_args"] = cli_args
    name = f"vllm.entrypoints.launchers.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments(module: Any, options: list[str]) -> Any:
    parser = module.make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(["-i", "unused", "-o", "unused", *options])


async def _empty_cache(client: Any) -> None:
    # It cannot while the last blocks of the file before are still held.
    while not await client.reset_prefix_cache():  # noqa: ASYNC110 - it has no event for that
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]))
