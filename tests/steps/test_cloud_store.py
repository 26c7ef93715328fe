"""A whole batch whose input, results and object store are in Azure, as Azurite has it."""

from __future__ import annotations

import gzip
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.locations.location import parse_location, read_location, write_location
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.hurry import hurried
from tests.services.azure import azurite_for_session
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from batchyard.storage.cloud_bucket import AzureCredentials

OUTPUT = "az://batches/out/results.jsonl.gz"


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureCredentials]:
    with azurite_for_session() as credentials:
        yield credentials


@pytest.fixture
async def yard(
    tmp_path: Path, empty_home: Path, azure: AzureCredentials, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Yard]:
    """With the credentials in the environment, as for the object store in production."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure.account_name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure.account_key)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.endpoint_url)
    engine = StubEngine(max_num_seqs=8)

    async def engine_for(_: str) -> StubEngine:
        return engine

    settings = read_settings(
        home=shutil.copytree(empty_home, tmp_path / "home"),
        storage="az://batches/yard",
        chunk_requests=10,
        flush_seconds=0.05,
    )
    async with open_services(settings, engine_for=engine_for) as services:
        with hurried():
            yield Yard(services, tmp_path, engine)


async def test_a_batch_runs_from_bucket_to_bucket(yard: Yard) -> None:
    lines = [chat_line(f"id-{n}") for n in range(25)]
    path = yard.folder / "in.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    access = yard.services.access
    await write_location(parse_location("az://batches/in/one.jsonl.gz"), path, access)

    batch = await yard.run([], input="az://batches/in/one.jsonl.gz", output=OUTPUT)

    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 25)
    raw = parse_location(OUTPUT).read(access, limit_bytes=2**20)
    assert b"".join([block async for block in raw]).startswith(b"\x1f\x8b")
    plain = read_location(parse_location(OUTPUT), limit_bytes=2**20, access=access)
    results = b"".join([block async for block in plain]).splitlines()
    assert [json.loads(line)["custom_id"] for line in results] == [f"id-{n}" for n in range(25)]
    stored = [key async for key in yard.services.storage.list("files/")]
    assert f"files/{batch.input_file_id}" in stored
