"""The receivers of docs/how-to/receive-webhooks.md, in Python and JavaScript, as they stand there.

Each is made with the page's command, on HTTPS, and told of a batch by ``batchyard up``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.pages import block, replaced
from tests.services.node import node_folder
from tests.services.ports import free_port
from tests.up.programs import WAIT_SECONDS, batch_of, custom_ids, shown

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

    import openai
    import trustme

    from tests.services.up import Yard

pytestmark = pytest.mark.vllm

PAGE = "docs/how-to/receive-webhooks.md"
FASTAPI, START_FASTAPI = block(PAGE, "fastapi"), block(PAGE, "start-fastapi")
EXPRESS, START_EXPRESS = block(PAGE, "express"), block(PAGE, "start-express")
CREATE = block(PAGE, "create-by-curl")


@dataclass(frozen=True)
class Program:
    """A receiver, and the page's command for it."""

    file_name: str
    text: str
    command: str


PROGRAMS = (
    Program("receiver.py", FASTAPI, START_FASTAPI),
    Program("receiver.mjs", EXPRESS, START_EXPRESS),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.file_name)
def test_a_receiver_fetches_the_results_of_a_batch(
    program: Program, yard: Yard, client: openai.OpenAI, folder: Path, authority: trustme.CA
) -> None:
    """And takes no event that is signed by somebody else."""
    if program.file_name.endswith("mjs"):
        (folder / "node_modules").symlink_to(node_folder() / "node_modules")
    identity = authority.issue_cert("localhost")
    identity.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in identity.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    port = free_port()
    url = f"https://localhost:{port}/batchyard"
    endpoint = shown(
        replaced(CREATE, {"https://receiver.example:8443/batchyard": url}), folder, yard
    )
    environment = yard.client_environment() | {
        "OPENAI_WEBHOOK_SECRET": endpoint["signing_secret"],
        "PATH": yard.operator_environment()["PATH"],
    }
    try:
        with running(program, port, folder, environment):
            batch_id = batch_of(client, folder / "batchinput.jsonl")
            wait_for(folder / f"{batch_id}.jsonl", folder / "said")
            forged = httpx.post(
                url,
                json={"type": "batch.completed", "data": {"id": "batch_1"}},
                headers={
                    "webhook-id": "wh_1",
                    "webhook-timestamp": str(int(time.time())),
                    "webhook-signature": "v1,AAAA",
                },
                verify=trusting(authority),
            )
    finally:
        client.webhooks.delete(endpoint["id"])
    assert forged.status_code == 400
    assert custom_ids((folder / f"{batch_id}.jsonl").read_text()) == ["request-1", "request-2"]
    assert (folder / "said").read_text().count(f"batch.completed {batch_id}") == 1


@contextlib.contextmanager
def running(
    program: Program, port: int, folder: Path, environment: dict[str, str]
) -> Iterator[None]:
    """Return to the block when it listens; everything of it is gone afterwards."""
    text, command = (each.replace("8443", str(port)) for each in (program.text, program.command))
    (folder / program.file_name).write_text(text)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not listens(port):
            assert process.poll() is None, (folder / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(path: Path, said: Path) -> None:
    """Until the file is there, whole."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    authority.configure_trust(context)
    return context


def listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port)).close()
    except OSError:
        return False
    return True
