"""`batchyard up` on a disk that fails now and then."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from typing import TYPE_CHECKING

import openai
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from batchyard.engine.stub.stub import StubEngine
from blocks import RemoteEngineBlock
from tests.contract.engine.stub_server import API_KEY, serve
from tests.services.disk_errors import Calls, DiskErrors
from tests.services.up import running_yard
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.up import Yard

MODEL = "stub-model"
SECONDS = 150.0
LINES = 400
CLIENTS = 3
PLACES = ["home/batchyard.db", "home/objects", "home/spool", "home/prefect/", "home/"]
ERRORS = {
    Calls.WRITE: [errno.EIO, errno.ENOSPC, errno.EDQUOT],
    Calls.FSYNC: [errno.EIO],
    Calls.READ: [errno.EIO],
    Calls.OPEN: [errno.EIO, errno.EMFILE, errno.EACCES],
    Calls.NAME: [errno.EIO, errno.ENOSPC],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
async def test_errors_of_the_disk_end_no_batch_and_lose_no_line(tmp_path: Path, seed: int) -> None:
    """Of the database, of objects, of Prefect's database and of everything in the home."""
    disk = DiskErrors(tmp_path)
    engine = StubEngine(MODEL, latency=0.05, max_num_seqs=16, keep_log=False)
    await engine.start()
    with running_yard(tmp_path, **disk.environment) as yard:
        async with serve(engine) as url:
            await _save_block(yard, url)
            failing = asyncio.create_task(_fail_now_and_then(disk, random.Random(seed)))
            batches = await asyncio.gather(
                *(_run_batches(yard, client, failing) for client in range(CLIENTS))
            )
            await failing
        assert yard.process.poll() is None
    assert min(batches) > 1
    assert disk.count > 20


async def _fail_now_and_then(disk: DiskErrors, dice: random.Random) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + SECONDS
    while clock() < deadline:
        calls = dice.choice(list(ERRORS))
        percent = dice.choice([5, 30, 100])
        disk.begin(calls, dice.choice(ERRORS[calls]), dice.choice(PLACES), percent)
        await asyncio.sleep(dice.uniform(1, 7))
        disk.end()
        await asyncio.sleep(dice.uniform(2, 6))


async def _save_block(yard: Yard, url: str) -> None:
    settings = {
        PREFECT_API_URL: yard.environment["PREFECT_API_URL"],
        PREFECT_API_AUTH_STRING: yard.prefect_login,
    }
    with temporary_settings(settings):
        block = RemoteEngineBlock(
            model=MODEL, base_url=url, api_key=API_KEY, max_num_seqs=16, exclusive=True
        )
        await block.save(MODEL, overwrite=True)


async def _run_batches(yard: Yard, client: int, failing: asyncio.Task[None]) -> int:
    """One after the other, until nothing fails any more; how many."""
    count = 0
    async with openai.AsyncOpenAI(
        base_url=yard.url, api_key=yard.key, max_retries=30, timeout=60
    ) as api:
        while not failing.done():
            await _run_batch(api, f"{client}-{count}")
            count += 1
    return count


async def _run_batch(api: openai.AsyncOpenAI, name: str) -> None:
    names = [f"{name}-{number}" for number in range(LINES)]
    lines = "".join(f"{json.dumps(chat_line(each, each))}\n" for each in names)
    file = await api.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = await api.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in {"validating", "in_progress", "finalizing"}:
        await asyncio.sleep(0.5)
        batch = await api.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    assert batch.output_file_id is not None
    output = await api.files.content(batch.output_file_id)
    answered = [json.loads(line)["custom_id"] for line in output.text.splitlines()]
    assert sorted(answered) == sorted(names)
