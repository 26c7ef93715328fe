"""docs/how-to/use-the-api.md as a test: its programs and commands as they stand there.

They run against ``batchyard up`` with real vLLM. They learn the base URL and the key from their
environment, as the page says; nothing in them is changed but the ids and addresses of its examples.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from tests.pages import block, replaced
from tests.services.node import run_node
from tests.services.up import ROOT, Yard
from tests.unit.storage.web_server import Seen, running_web_server
from tests.up.programs import WAIT_SECONDS, bash, custom_ids, run_python, shown

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator
    from pathlib import Path

    import openai

pytestmark = pytest.mark.vllm

PAGE = "docs/how-to/use-the-api.md"
CUT = "---- the next block ----"
BUCKET = "https://bucket.example"
CONFLICT = "Cannot cancel a batch with status 'completed'."

UPLOAD, CREATE, RETRIEVE, CONTENT, CANCEL, LIST, DELIVER = (
    block(PAGE, name)
    for name in ("upload", "create", "retrieve", "content", "cancel", "list", "deliver")
)
PROGRAMS = ("python-run", "python-cancel", "python-bad-lines", "python-urls", "python-requests")


@dataclass
class Bucket:
    """What the page's presigned URLs lead to: it gives the input and takes everything else."""

    url: str
    delivered: asyncio.Future[Seen]


@pytest.fixture
async def bucket(folder: Path, server_tls: ssl.SSLContext) -> AsyncIterator[Bucket]:
    delivered = asyncio.get_running_loop().create_future()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "PUT":
            delivered.set_result(server.requests[-1])
            return web.Response()
        return web.Response(body=(folder / "batchinput.jsonl").read_bytes())

    async with running_web_server(server_tls) as server:
        server.answers = [answer]
        yield Bucket(server.base_url, delivered)


async def test_the_python_programs(yard: Yard, folder: Path, bucket: Bucket) -> None:
    """Run, cancel and list, bad input, and an input and an output that are somewhere else."""
    program = f"\nprint({CUT!r})\n".join(block(PAGE, name) for name in PROGRAMS)
    program = replaced(program, {BUCKET: bucket.url})
    said = await asyncio.to_thread(run_python, program, folder, yard.client_environment())
    ran, cancelled, refused, *_ = said.split(f"{CUT}\n")

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
    said = run_node(block(PAGE, "javascript"), cwd=folder, environment=yard.client_environment())
    assert said.startswith("completed { total: 2, completed: 2, failed: 0 }\n")
    assert custom_ids(said) == ["request-1", "request-2"]
    assert re.fullmatch(r"batch_\w+ completed", said.splitlines()[-1])


def test_a_background_response(yard: Yard, folder: Path) -> None:
    program = block("docs/how-to/background-responses.md", "background")
    status, _, text = run_python(program, folder, yard.client_environment()).partition(" ")
    # Answers of random weights rarely end by themselves.
    assert status in {"completed", "incomplete"}
    assert text.strip()


def test_a_chain_of_two_stages(yard: Yard, folder: Path) -> None:
    program = block("docs/how-to/chain-batches.md", "chain")
    said = run_python(program, folder, yard.client_environment())
    assert said.split() == ["completed", "3", "tide-1", "tide-2", "tide-3"]


def test_the_curl_commands(yard: Yard, folder: Path) -> None:
    """From the upload to the download, then another batch that is cancelled, and the list."""
    file_id = shown(UPLOAD, folder, yard)["id"]
    batch_id = shown(replaced(CREATE, {"file-abc123": file_id}), folder, yard)["id"]
    retrieve = replaced(RETRIEVE, {"batch_abc123": batch_id})
    deadline = time.monotonic() + WAIT_SECONDS
    while (batch := shown(retrieve, folder, yard))["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    content = replaced(CONTENT, {"file-xyz123": batch["output_file_id"]})
    bash(content, folder, yard.client_environment())
    assert custom_ids((folder / "batch_output.jsonl").read_text()) == ["request-1", "request-2"]

    make_long(folder / "batchinput.jsonl")
    long_id = shown(UPLOAD, folder, yard)["id"]
    (delivery,) = shown(replaced(DELIVER, {"batch_abc123": batch_id}), folder, yard)["data"]
    assert (delivery["kind"], delivery["recipient"]) == ("file", "bucket.example")
    other_id = shown(replaced(CREATE, {"file-abc123": long_id}), folder, yard)["id"]
    cancelled = shown(replaced(CANCEL, {"batch_abc123": other_id}), folder, yard)
    assert cancelled["status"] == "cancelling"
    ended = shown(replaced(CANCEL, {"batch_abc123": batch_id}), folder, yard)
    assert ended["error"]["message"] == CONFLICT
    # Batches of the same second come in any order.
    assert {other_id, batch_id} <= {each["id"] for each in shown(LIST, folder, yard)["data"]}


def test_the_lines_that_up_prints(yard: Yard, client: openai.OpenAI) -> None:
    """Copied into another terminal, they run a batch."""
    (lines,) = re.findall(r"^A batch, .*:\n((?:  .*\n)+)", yard.said(), re.MULTILINE)
    done = subprocess.run(
        ["bash", "-e"], input=lines, cwd=yard.folder, capture_output=True, text=True, check=True
    )
    batch_id = json.loads(done.stdout)["id"]
    deadline = time.monotonic() + WAIT_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1


def test_the_models_on_offer(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-chat"]


def test_the_sdk_finds_the_api_by_its_environment(yard: Yard, folder: Path) -> None:
    """README.md, with our address and key."""
    setting, command = (line.removeprefix("$ ") for line in commands_of("README.md", "sdk"))
    assert re.findall(r"(\w+)=", setting) == ["OPENAI_BASE_URL", "OPENAI_API_KEY"]
    environment = yard.client_environment() | {"PATH": yard.operator_environment()["PATH"]}
    command = replaced(command, {".venv/bin/": ""})
    assert "SyncCursorPage" in bash(command, folder, environment)


def test_a_batch_by_prefects_command(yard: Yard, folder: Path) -> None:
    """docs/how-to/run-from-prefect.md, with another folder than /tmp. Its log links to its page."""
    text = block("docs/how-to/run-from-prefect.md", "deployment-run")
    text = text.replace("/tmp/", f"{folder}/")  # noqa: S108 - the page has it
    environment = yard.operator_environment()
    said = bash(text, folder, environment)
    assert sorted(custom_ids(said)) == ["one", "two"]
    newest = json.loads(bash("batchyard list --all --json", folder, environment).splitlines()[0])
    log = bash(f"batchyard logs {newest['id']}", folder, environment)
    assert f"{yard.url.removesuffix('/v1')}/batches/{newest['id']}" in log


def test_the_file_of_the_readme_runs_here_too(yard: Yard, folder: Path) -> None:
    """README.md's first block without its engine: `batchyard submit` as the sentence has it."""
    file, _, _ = block("README.md", "first-batch").partition(".venv/bin/batchyard run")
    page = (ROOT / "README.md").read_text()
    (submit,) = re.findall(r"`\.venv/bin/(batchyard submit -i requests\.jsonl)`", page)
    said = bash(f"{file}{submit} -o out.jsonl --wait", folder, yard.operator_environment())
    assert "completed" in said
    assert custom_ids((folder / "out.jsonl").read_text()) == ["one", "two"]


async def test_a_batch_of_presigned_urls_by_submit(
    yard: Yard, folder: Path, bucket: Bucket
) -> None:
    """docs/how-to/run-from-prefect.md."""
    environment = yard.operator_environment() | {
        "PRESIGNED_GET": f"{bucket.url}/requests.jsonl?X-Amz-Signature=abc123",
        "PRESIGNED_PUT": f"{bucket.url}/results.jsonl?X-Amz-Signature=abc123",
    }
    text = block("docs/how-to/run-from-prefect.md", "submit")
    said = await asyncio.to_thread(bash, text, folder, environment)
    assert re.fullmatch(r"batch_\w+\n", said)
    put = await asyncio.wait_for(bucket.delivered, WAIT_SECONDS)
    assert custom_ids(put.body.decode()) == ["request-1", "request-2"]


def test_a_batch_of_a_tenant_with_a_priority(yard: Yard, folder: Path) -> None:
    """docs/how-to/operate-batches.md, with our model and Prefect server."""
    (folder / "batchinput.jsonl").rename(folder / "requests.jsonl")
    environment = yard.operator_environment()
    text = replaced(
        block("docs/how-to/operate-batches.md", "submit-with-priority"),
        {
            "http://127.0.0.1:4200/api": environment["PREFECT_API_URL"],
            "~/.batchyard": str(yard.home),
            "Qwen/Qwen3-8B": "tiny-chat",
        },
    )
    batch_id = bash(text, folder, environment).strip()
    shown = json.loads(bash(f"batchyard show {batch_id} --json", folder, environment))
    assert (shown["batchyard"]["tenant"], shown["batchyard"]["priority"]) == ("search", 5)


def commands_of(page: str, name: str) -> list[str]:
    return block(page, name).splitlines()


def make_long(path: Path) -> None:
    """So many requests that a batch of them does not end before somebody cancels it."""
    line = path.read_text().splitlines(keepends=True)[0]
    path.write_text("".join(line.replace("request-1", f"request-{n}") for n in range(3000)))
