"""`make demo`: three small batches through the whole product, on real vLLM.

The two-request example of vLLM's run-batch guide, a file that mixes chat, completions and
responses (one request of which is refused), and embeddings as floats and as base64. Each is a run
of the process-batch flow, with SQLite, a local folder and a Prefect API that lives as long as
this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".batchyard" / "demo"
RESULTS = HOME / "results"
MODELS = ROOT / ".models"

HOME.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("BATCHYARD_HOME", str(HOME))
os.environ.setdefault("PREFECT_HOME", str(HOME / "prefect"))

from batchyard.web.proxies import without_proxy  # noqa: E402 - the homes come first
from commands.foreground import prepare_prefect, run_to_end  # noqa: E402

os.environ |= without_proxy(os.environ)
OWN_PREFECT = prepare_prefect()

from batchyard.cli.terminal.progress import ProgressDisplay  # noqa: E402 - Prefect is prepared first
from batchyard.engine.stub.warm import WarmEngine  # noqa: E402
from batchyard.engine.vllm.vllm import VllmEngine  # noqa: E402
from batchyard.locations.local_file import LocalFile  # noqa: E402
from batchyard.services.machine.engine_python import engine_python  # noqa: E402
from batchyard.services.services import open_services  # noqa: E402
from batchyard.settings import read_settings  # noqa: E402
from batchyard.steps.create.create import BatchRequest, create_batch  # noqa: E402
from flows.process.worker import credentials_from_block, engine_log  # noqa: E402

CHAT_NAMES = ("meta-llama/Meta-Llama-3-8B-Instruct", "tiny-chat")
INPUTS = ("two-requests", "mixed", "embeddings")


async def main() -> int:
    settings = read_settings(runners="inline", cache_shared_by="all")
    python = engine_python(settings)
    chat = WarmEngine(
        VllmEngine(
            CHAT_NAMES[0],
            ["--served-model-name", *CHAT_NAMES, "--max-model-len", "2048", "--enforce-eager"],
            python=python,
            weights=str(MODELS / "tiny-chat"),
            log_path=engine_log(settings, "tiny-chat"),
        )
    )
    embed = WarmEngine(
        VllmEngine(
            "tiny-embed",
            ["--enforce-eager"],
            python=python,
            weights=str(MODELS / "tiny-embed"),
            log_path=engine_log(settings, "tiny-embed"),
        )
    )

    async def engine_for(model: str) -> WarmEngine:
        return chat if model in CHAT_NAMES else embed

    RESULTS.mkdir(parents=True, exist_ok=True)
    status = 0
    try:
        for name in INPUTS:
            if name == "embeddings":
                await chat.close()
            with ProgressDisplay(title=f"{name}.jsonl") as display:
                async with open_services(
                    settings,
                    engine_for=engine_for,
                    credentials=credentials_from_block,
                    on_progress=display,
                ) as services:
                    request = BatchRequest(
                        input=LocalFile(ROOT / "examples" / f"{name}.jsonl"),
                        output=LocalFile(RESULTS / f"{name}.jsonl"),
                        error=LocalFile(RESULTS / f"{name}.errors.jsonl"),
                        metadata={"example": name},
                    )
                    batch_id = await create_batch(services, request)
                    ending = await run_to_end(services, batch_id, OWN_PREFECT)
                    if ending.status:
                        display.fail()
            print(ending.text)
            print(f"  an answer {first_answer(RESULTS / f'{name}.jsonl')}")
            status |= ending.status
    finally:
        await chat.close()
        await embed.close()
    home = os.environ["PREFECT_HOME"]
    print(f"\nTo see the flow runs: PREFECT_HOME={home} .venv/bin/prefect server start")
    return status


def first_answer(results: Path) -> str:
    """What the model said to the first request: random words, as its weights are random."""
    line = json.loads(results.read_text().splitlines()[0])
    body = line["response"]["body"]
    if "choices" in body:
        return f"{line['custom_id']}: {body['choices'][0]['message']['content'][:60]!r}"
    vector = body["data"][0]["embedding"]
    return f"{line['custom_id']}: {len(vector)} numbers, the first {vector[0]:.4f}"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
