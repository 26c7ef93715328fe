"""Runs in the engine environment: vLLM's own run_batch on several files with one engine.

The engine is started once; each file's time is that of ``run_batch`` alone, as its command calls
it. Prints one JSON object: file name to seconds. Arguments: files, ``--``, engine options.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.run_batch import make_arg_parser, run_batch
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def main() -> None:
    cut = sys.argv.index("--")
    files, options = sys.argv[1:cut], sys.argv[cut + 1 :]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["-i", files[0], "-o", "unused", *options])
    seconds = {}
    async with build_async_engine_client(
        args, usage_context=UsageContext.OPENAI_BATCH_RUNNER
    ) as client:
        for file in files:
            args.input_file, args.output_file = file, f"{file}.run-batch-out"
            began = time.perf_counter()
            await run_batch(client, args)
            seconds[file] = time.perf_counter() - began
    print("RESULT " + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
