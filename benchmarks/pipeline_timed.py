"""Batchyard on several files with one engine: each is a whole run of the process-batch flow.

The time of a file runs from the call of the flow to its return: fetch, validate, plan, run,
collect, publish, and Prefect's share. The engine and the Prefect API are up before. Prints one
JSON object: file name to ``{"seconds", "requests", "cached"}``. Arguments as ``run_batch_timed``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from flows.foreground import prepare_prefect

prepare_prefect()

from batchyard.engine.vllm import VllmEngine  # noqa: E402 - Prefect reads its settings on import
from batchyard.engine.warm import WarmEngine  # noqa: E402
from batchyard.lifecycle import BatchStatus  # noqa: E402
from batchyard.settings import read_settings  # noqa: E402
from batchyard.steps.create import BatchRequest, create_batch  # noqa: E402
from batchyard.steps.services import Services, open_services  # noqa: E402
from flows.process_batch import process_batch  # noqa: E402
from flows.worker import engine_python, s3_credentials_from_block  # noqa: E402


async def main() -> None:
    cut = sys.argv.index("--")
    files, options = sys.argv[1:cut], sys.argv[cut + 1 :]
    model = options[options.index("--model") + 1]
    with tempfile.TemporaryDirectory() as home:
        settings = read_settings(home=Path(home), order=os.environ.get("BENCH_ORDER", "prefix"))
        engine = WarmEngine(VllmEngine(model, options, python=engine_python(settings)))

        async def engine_for(_: str) -> WarmEngine:
            return engine

        try:
            await engine.start()
            async with open_services(
                settings, engine_for=engine_for, s3_credentials=s3_credentials_from_block
            ) as services:
                # The first flow of a process starts the Prefect API.
                await _timed(services, files[0])
                results = {file: await _timed(services, file) for file in files}
        finally:
            await engine.close()
    print("RESULT " + json.dumps(results), flush=True)


async def _timed(services: Services, file: str) -> dict[str, float]:
    batch_id = await create_batch(services, BatchRequest(input=file, output=f"{file}.ours-out"))
    began = time.perf_counter()
    state = await process_batch(batch_id, return_state=True)
    seconds = time.perf_counter() - began
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.COMPLETED or batch.counts.failed:
        sys.exit(f"{file}: {state.message}")
    usage = batch.usage
    cached = usage.input_tokens_details.cached_tokens / max(1, usage.input_tokens)
    return {"seconds": seconds, "requests": batch.counts.total, "cached": cached}


if __name__ == "__main__":
    asyncio.run(main())
