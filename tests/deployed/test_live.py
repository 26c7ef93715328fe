"""A live engine in the deployed product: kept without batches, beside them, and after a loss."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import openai
import pytest

from blocks import VllmEngineBlock
from tests.deployed.conftest import deployed_in, until
from tests.live import stub_python, witness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deployed.conftest import Deployment
    from tests.services.prefect import PrefectServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "live-model"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One of its own, whose engines are stubs behind the product's own adapter."""
    folder = tmp_path_factory.mktemp("live")
    python = stub_python(folder / "engine")
    with deployed_in(
        folder,
        BATCHYARD_ENGINE_PYTHON=str(python),
        BATCHYARD_QUOTA__LIVE_REQUESTS="8",
        BATCHYARD_RUNNER_IDLE_SECONDS="1",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: PrefectServer) -> openai.AsyncOpenAI:
    """OpenAI's client, and the API in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    key = server.run("batchyard", "keys", "create", "live").split()[0]
    server.start_as("api", "batchyard", "serve", "--port", str(port))
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60
    )


def block(folder: Path, *, live: bool) -> VllmEngineBlock:
    return VllmEngineBlock(
        model=MODEL,
        weights=str(folder),
        options="--max-num-seqs 8",
        environment={"HOME": str(folder)},
        live=live,
    )


async def answer(client: openai.AsyncOpenAI, text: str = "hello") -> str | None:
    """None: no engine takes it now."""
    with suppress(openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
        asked: list[Any] = [{"role": "user", "content": text}]
        done = await client.chat.completions.create(model=MODEL, messages=asked, max_tokens=4)
        return done.choices[0].message.content
    return None


async def test_a_live_engine_runs_without_batches_beside_them_and_again_after_a_loss(
    deployment: Deployment, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    """And ends when its block is no longer live."""
    await deployment.save_block(block(tmp_path, live=True))
    assert await until(lambda: answer(client))
    (first,) = await deployment.running("run-chunks")

    source, output = deployment.input(MODEL, 200, "question takes 20 ms")
    batch_id = await deployment.submit(source, output)
    await deployment.answered(batch_id, 20)
    slow: list[Any] = [{"role": "user", "content": "takes 30 ms"}]
    stream = await client.chat.completions.create(model=MODEL, messages=slow, stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason

    await deployment.kill_processes("run-chunks")
    assert await until(lambda: answer(client, "after the loss"))
    await deployment.ended_batch(batch_id)
    await deployment.checked(batch_id, source)
    (second,) = await deployment.running("run-chunks")
    assert first["id"] != second["id"]
    # Longer than it would stay without work.
    await asyncio.sleep(3)
    assert await answer(client)

    await deployment.save_block(block(tmp_path, live=False))

    async def are_gone() -> bool:
        return not await deployment.running("run-chunks")

    await until(are_gone)
    with pytest.raises(openai.NotFoundError, match="for batches only"):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert len(witness(tmp_path)) >= 200
