"""docs/how-to/use-the-api.md as a test: its programs and commands as they stand there.

They run against ``batchyard up`` with real vLLM. They learn the base URL and the key from their
environment, as the page says; nothing in them is changed but the ids and addresses of its examples.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from aiohttp import web

from tests.contract.engine.conftest import require_vllm
from tests.services.node import run_node
from tests.services.up import ROOT, Yard, running_yard
from tests.unit.storage.web_server import Seen, running_web_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.vllm

PAGE = (ROOT / "docs" / "how-to" / "use-the-api.md").read_text()
CUT = "---- the next block ----"
BUCKET = "https://bucket.example"
CONFLICT = "Cannot cancel a batch with status 'completed'."
WAIT_SECONDS = 120.0


def blocks(language: str) -> list[str]:
    """The page's blocks of code in this language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


INPUT, *CURL = blocks("bash")
UPLOAD, CREATE, RETRIEVE, CONTENT, CANCEL, LIST = CURL


@pytest.fixture(scope="module", name="yard")
def yard_with_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    require_vllm()
    more = {"BATCHYARD_ALLOW_PRIVATE_URLS": "true", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running_yard(tmp_path_factory.mktemp("yard"), **more) as running:
        yield running


@pytest.fixture
def client(yard: Yard) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as opened:
        yield opened


@dataclass
class Bucket:
    """What the page's presigned URLs lead to: it gives the input and takes everything else."""

    url: str
    delivered: asyncio.Future[Seen]


@pytest.fixture
async def bucket(folder: Path) -> AsyncIterator[Bucket]:
    delivered = asyncio.get_running_loop().create_future()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "PUT":
            delivered.set_result(server.requests[-1])
            return web.Response()
        return web.Response(body=(folder / "batchinput.jsonl").read_bytes())

    async with running_web_server() as server:
        server.answers = [answer]
        yield Bucket(server.base_url, delivered)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the page's input file."""
    subprocess.run(["bash", "-e"], input=INPUT, cwd=tmp_path, text=True, check=True)
    return tmp_path


async def test_the_python_programs(yard: Yard, folder: Path, bucket: Bucket) -> None:
    """Run, cancel and list, bad input, and an input and an output that are somewhere else."""
    program = f"\nprint({CUT!r})\n".join(blocks("python")).replace(BUCKET, bucket.url)
    said = await asyncio.to_thread(run_python, program, folder, yard)
    ran, cancelled, refused, _ = said.split(f"{CUT}\n")

    assert ran.startswith("completed BatchRequestCounts(completed=2, failed=0, total=2)\n")
    assert custom_ids(ran) == ["request-1", "request-2"]

    first, *listed = cancelled.splitlines()
    assert first == "cancelling"
    assert re.fullmatch(r"batch_\w+ (cancelling|cancelled)", listed[0])
    assert f"Error code: 409 - {CONFLICT}" in listed

    assert [line.split()[:2] for line in refused.splitlines()] == [
        ["1", "invalid_url"],
        ["2", "invalid_url"],
    ]

    put = await asyncio.wait_for(bucket.delivered, WAIT_SECONDS)
    assert put.path_and_query == "/results.jsonl?X-Amz-Signature=abc123"
    assert custom_ids(put.body.decode()) == ["request-1", "request-2"]


def test_the_javascript_program(yard: Yard, folder: Path) -> None:
    (program,) = blocks("javascript")
    said = run_node(program, cwd=folder, environment=yard.client_environment())
    assert said.startswith("completed { total: 2, completed: 2, failed: 0 }\n")
    assert custom_ids(said) == ["request-1", "request-2"]
    assert re.fullmatch(r"batch_\w+ completed", said.splitlines()[-1])


def test_the_curl_commands(yard: Yard, folder: Path) -> None:
    """From the upload to the download, then another batch that is cancelled, and the list."""
    file_id = shown(yard, folder, UPLOAD)["id"]
    create = CREATE.replace("file-abc123", file_id)
    batch_id = shown(yard, folder, create)["id"]
    retrieve = RETRIEVE.replace("batch_abc123", batch_id)
    deadline = time.monotonic() + WAIT_SECONDS
    while (batch := shown(yard, folder, retrieve))["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    bash(yard, folder, CONTENT.replace("file-xyz123", batch["output_file_id"]))
    assert custom_ids((folder / "batch_output.jsonl").read_text()) == ["request-1", "request-2"]

    make_long(folder / "batchinput.jsonl")
    long_id = shown(yard, folder, UPLOAD)["id"]
    other_id = shown(yard, folder, CREATE.replace("file-abc123", long_id))["id"]
    assert shown(yard, folder, CANCEL.replace("batch_abc123", other_id))["status"] == "cancelling"
    ended = shown(yard, folder, CANCEL.replace("batch_abc123", batch_id))
    assert ended["error"]["message"] == CONFLICT
    assert [each["id"] for each in shown(yard, folder, LIST)["data"]][:2] == [other_id, batch_id]


def test_the_lines_that_up_prints(yard: Yard, client: openai.OpenAI) -> None:
    """Copied into another terminal, they run a batch."""
    (lines,) = re.findall(r"^A batch, .*:\n((?:  .*\n)+)", yard.said(), re.MULTILINE)
    done = subprocess.run(
        ["bash", "-e"], input=lines, cwd=ROOT, capture_output=True, text=True, check=True
    )
    batch_id = json.loads(done.stdout)["id"]
    deadline = time.monotonic() + WAIT_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2


def test_the_models_on_offer(yard: Yard, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-chat"]


def test_ctrl_c_stops_everything(yard: Yard) -> None:
    """The last one here: a warm engine, flow runs, workers, servers, in the end ``up`` itself."""
    assert yard.interrupt() == 0
    assert yard.is_over()


def make_long(path: Path) -> None:
    """So many requests that a batch of them does not end before somebody cancels it."""
    line = path.read_text().splitlines(keepends=True)[0]
    path.write_text("".join(line.replace("request-1", f"request-{n}") for n in range(3000)))


def run_python(program: str, cwd: Path, yard: Yard) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=yard.client_environment(),
        capture_output=True,
        text=True,
        timeout=2 * WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bash(yard: Yard, cwd: Path, command: str) -> str:
    done = subprocess.run(
        ["bash", "-e"],
        input=command,
        cwd=cwd,
        env=yard.client_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    return done.stdout


def shown(yard: Yard, cwd: Path, command: str) -> dict[str, Any]:
    """The JSON object that the command gets."""
    answer: dict[str, Any] = json.loads(bash(yard, cwd, command))
    return answer


def custom_ids(text: str) -> list[str]:
    """Of the lines of a result file among the others; each was answered."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"id"')]
    assert all(line["response"]["status_code"] == 200 for line in lines)
    return [line["custom_id"] for line in lines]
