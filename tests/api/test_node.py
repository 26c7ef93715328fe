"""OpenAI's SDK for Node against the API: what it does otherwise than the one for Python."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.lifecycle import BatchStatus
from tests.api.conftest import LINE, Api
from tests.contract.store.samples import batch_in, new_batch
from tests.services.node import node_folder, run_node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.services.services import Services

    Node = Callable[..., Any]

# `sent` has the requests that went out, those of the SDK's own retries too.
PROLOGUE = """
import fs from "fs";
import { createHash } from "crypto";
import OpenAI from "openai";
const sent = [];
const openai = new OpenAI({
  fetch: (url, options) => {
    sent.push(`${options.method.toUpperCase()} ${new URL(url).pathname}`);
    return fetch(url, options);
  },
});
const sha256 = (text) => createHash("sha256").update(text).digest("hex");
const show = (value) => console.log(JSON.stringify(value));
"""


@pytest.fixture
def node(api: Api, tmp_path: Path) -> Node:
    """Runs a program that ends with ``show(…)``; what it showed."""
    node_folder()

    def run(program: str, **environment: str) -> Any:
        ours = {"OPENAI_BASE_URL": api.url, "OPENAI_API_KEY": api.key, **environment}
        said = run_node(PROLOGUE + program, cwd=tmp_path, environment=os.environ | ours)
        return json.loads(said)

    return run


def test_a_stream_is_uploaded_and_comes_back(node: Node, tmp_path: Path) -> None:
    """The file before its purpose, in chunks, without a length."""
    content = LINE * 10_000
    (tmp_path / "batchinput.jsonl").write_bytes(content)
    shown = node("""
        const file = await openai.files.create({
          file: fs.createReadStream("batchinput.jsonl"),
          purpose: "batch",
        });
        const back = await (await openai.files.content(file.id)).text();
        show({ file, back: sha256(back) });
    """)
    file = shown["file"]
    assert (file["filename"], file["purpose"]) == ("batchinput.jsonl", "batch")
    assert file["bytes"] == len(content)
    assert shown["back"] == hashlib.sha256(content).hexdigest()


def test_a_batch_is_created_and_looked_at(node: Node, tmp_path: Path) -> None:
    (tmp_path / "batchinput.jsonl").write_bytes(LINE)
    shown = node("""
        const file = await openai.files.create({
          file: fs.createReadStream("batchinput.jsonl"),
          purpose: "batch",
        });
        const batch = await openai.batches.create({
          input_file_id: file.id,
          endpoint: "/v1/completions",
          completion_window: "24h",
          metadata: { description: "nightly eval job" },
        });
        show([batch, await openai.batches.retrieve(batch.id)]);
    """)
    created, retrieved = shown
    assert created == retrieved
    assert created["status"] == "validating"
    assert created["metadata"] == {"description": "nightly eval job"}


async def test_all_pages_are_read_without_a_gap(node: Node, services: Services) -> None:
    made = [await services.store.batches.create(new_batch(tenant="one")) for _ in range(45)]
    shown = node("""
        const ids = [];
        for await (const batch of openai.batches.list()) ids.push(batch.id);
        show({ ids, sent });
    """)
    assert sorted(shown["ids"]) == sorted(batch.id for batch in made)
    assert shown["sent"] == ["GET /v1/batches"] * 3


async def test_a_conflict_is_answered_once(node: Node, services: Services) -> None:
    """The SDK would try a 409 three times, if it were not told not to."""
    batch = await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
    shown = node(f"""
        try {{
          await openai.batches.cancel("{batch.id}");
        }} catch (error) {{
          show({{ name: error.constructor.name, message: error.message, sent }});
        }}
    """)
    assert shown["name"] == "ConflictError"
    assert "Cannot cancel a batch with status 'completed'." in shown["message"]
    assert shown["sent"] == [f"POST /v1/batches/{batch.id}/cancel"]


async def test_a_running_batch_is_cancelled(node: Node, services: Services) -> None:
    batch = await batch_in(services.store, BatchStatus.IN_PROGRESS, tenant="one")
    shown = node(f'show(await openai.batches.cancel("{batch.id}"));')
    assert shown["status"] == "cancelling"


def test_an_error_is_of_its_class_with_everything_it_says(node: Node) -> None:
    shown = node("""
        try {
          await openai.batches.create({
            input_file_id: "file-x", endpoint: "/v1/nothing", completion_window: "24h",
          });
        } catch (error) {
          const { param, code, type, requestID } = error;
          show({ name: error.constructor.name, param, code, type, requestID });
        }
    """)
    assert shown.pop("requestID").startswith("req_")
    assert shown == {
        "name": "BadRequestError",
        "param": "endpoint",
        "code": "invalid_value",
        "type": "invalid_request_error",
    }


def test_a_wrong_key_is_an_authentication_error(node: Node) -> None:
    shown = node(
        """
        try {
          await openai.models.list();
        } catch (error) {
          show([error.constructor.name, error.code, sent]);
        }
        """,
        OPENAI_API_KEY="sk-wrong",
    )
    assert shown == ["AuthenticationError", "invalid_api_key", ["GET /v1/models"]]
