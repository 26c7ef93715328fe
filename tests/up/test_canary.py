"""Secrets and prompts, each a word that is nowhere else, and a search for them afterwards.

Batches go well and badly, webhooks and e-mails arrive and are refused, each of it with a canary in
every place for a secret. Then all that ``batchyard up`` has written is read (logs, our database and
Prefect's, with what is not yet merged into them), and all that was sent to anybody.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sqlite3
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from aiohttp import web

from tests.services.receiver import Reply
from tests.unit.storage.web_server import running_web_server
from tests.up.conftest import SMTP_PASSWORD
from tests.up.programs import bash

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator

    from tests.services.receiver import Receiver
    from tests.services.smtp import MailServer
    from tests.services.up import Yard

pytestmark = pytest.mark.vllm

SECONDS = 600.0
"""The engine starts meanwhile, beside other tests."""
OVER = {"completed", "failed", "expired", "cancelled"}


def canary(place: str) -> str:
    return f"canary{place}{uuid.uuid4().hex}"


@dataclass
class Canaries:
    """``prompts`` may be in the object store, which holds inputs and results; the rest nowhere."""

    secrets: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)

    def secret(self, place: str) -> str:
        return self.secrets.setdefault(place, canary(place))

    def prompt(self, place: str) -> str:
        return self.prompts.setdefault(place, canary(place))

    def in_bytes(self, content: bytes, *, of: dict[str, str]) -> set[str]:
        """The places whose canary is in there, plainly or in base64."""
        return {
            place
            for place, word in of.items()
            if any(form in content for form in _forms(word.encode()))
        }


def _forms(word: bytes) -> Iterator[bytes]:
    yield word
    yield word.hex().encode()
    for shift in range(3):
        # Without what the neighbours decide.
        encoded = base64.b64encode(b"\0" * shift + word + b"\0" * 3)
        yield encoded[4 : len(word) * 4 // 3 - 4]


@pytest.fixture
def canaries() -> Canaries:
    return Canaries(secrets={"smtppassword": SMTP_PASSWORD})


@pytest.fixture
async def bucket(canaries: Canaries, server_tls: ssl.SSLContext) -> AsyncIterator[str]:
    """A store of presigned URLs; it says aloud what it was asked, where it refuses."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith("/refused"):
            return web.Response(status=403, text=f"<Code>{request.path_qs}</Code>")
        if request.method == "PUT":
            return web.Response()
        return web.Response(text=requests(canaries))

    async with running_web_server(server_tls) as server:
        server.answers = [answer]
        server.says_continue = True
        yield server.base_url


def requests(canaries: Canaries) -> str:
    """Two lines that are answered, and two that the engine refuses, in words that repeat them."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": canaries.prompt("prompt")}], "max_tokens": 4},
        {"messages": [{"role": "system", "content": canaries.prompt("system")}], "max_tokens": 4},
        {"messages": [{"role": "user", "content": "x"}], "temperature": canaries.prompt("number")},
        {"messages": canaries.prompt("messages")},
    ]
    lines = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny-chat", **body},
        }
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def bad_lines(canaries: Canaries) -> bytes:
    """What validation refuses, each with a prompt in it, after a line that it does not."""
    word = canaries.prompt("badline")
    head = '"method": "POST", "url": "/v1/chat/completions", "body"'
    bad = (
        f'{{"custom_id": "a", {head}: {{"{word}',
        f'{{"custom_id": "b", "method": "{word}", "url": "/{word}", "body": "{word}"}}',
        f'{{"custom_id": "c", {head}: {{"model": "{word}", "messages": [], "stream": "{word}"}}}}',
    )
    return "\n".join([requests(canaries).splitlines()[0], *bad, ""]).encode()


async def test_no_secret_and_no_prompt_is_anywhere_but_in_the_results(
    yard: Yard,
    receiver: Receiver,
    mail_server: MailServer,
    bucket: str,
    canaries: Canaries,
    tmp_path: Path,
) -> None:
    said = bash(
        "batchyard keys create canary --tenant canary", tmp_path, yard.operator_environment()
    )
    key = next(word for word in said.split() if word.startswith("sk-by-"))
    canaries.secrets["apikey"] = key
    canaries.secrets["prefectlogin"] = yard.prefect_login.partition(":")[2]
    with openai.OpenAI(base_url=yard.url, api_key=key, max_retries=0) as client:
        ids = await asyncio.to_thread(ask, client, receiver, mail_server, bucket, canaries)
        await ended(client, yard, ids)
        shown = everything_shown(client, yard, ids, tmp_path)
    assert "completed" in shown
    assert "failed" in shown

    for request in receiver.requests:
        sent = request.body + json.dumps(dict(request.headers)).encode()
        assert not found_in(canaries, sent), request.headers
    for mail in mail_server.mails:
        parts = b"".join(part.get_content().encode() for part in mail.message.iter_parts())
        assert not found_in(canaries, mail.content + parts), mail.message["Subject"]
    assert not found_in(canaries, shown.encode())

    hits = [(name, places) for name, places in search(yard, canaries) if places]
    assert hits == [("home/prefect.login", {"prefectlogin"})]
    objects = [path for path in (yard.home / "objects").rglob("*") if path.is_file()]
    kept = [found_in(canaries, path.read_bytes(), canaries.prompts) for path in objects]
    assert set().union(*kept) == canaries.prompts.keys()


def ask(
    client: openai.OpenAI,
    receiver: Receiver,
    mail_server: MailServer,
    bucket: str,
    canaries: Canaries,
) -> list[str]:
    """Batches that go well and badly, each with every secret that it can have; their ids."""
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=f"sk-by-{canaries.secret('wrongkey')}").models.list()
    # What is refused is tried again, and both are in the log. A second refusal of one delivery
    # would make it wait for five minutes.
    receiver.answers_at["/hook"] = [Reply(500, body=b"no")]
    receiver.answers_at["/own"] = [Reply(302, {"Location": "/there"})]
    mail_server.refusals.append("451 Come again")
    endpoint = client.webhooks.create(
        name="canary",
        url=receiver.url(f"/hook?token={canaries.secret('endpointurl')}"),
        event_types=["batch.completed", "batch.failed"],
    )
    canaries.secrets["endpointsecret"] = endpoint.signing_secret.removeprefix("whsec_")
    made = client.post("/webhook_secret", cast_to=dict[str, Any])
    canaries.secrets["tenantsecret"] = made["signing_secret"].removeprefix("whsec_")
    file = client.files.create(file=("in.jsonl", bad_lines(canaries)), purpose="batch")
    good = f"{bucket}/in.jsonl?X-Amz-Signature={canaries.secret('inputurl')}"
    wrong = f"{bucket}/refused/in.jsonl?X-Amz-Signature={canaries.secret('refusedinput')}"
    inputs: list[tuple[dict[str, Any], str]] = [
        ({"input_url": good}, "results"),
        ({"input_url": good}, "refused"),
        ({"input_url": wrong}, "results"),
        ({"input_file_id": file.id}, "results"),
        # Refused at once, with the URL in hand.
        ({"input_url": f"{good} "}, "results"),
    ]
    ids = []
    for given, there in inputs:
        extra = {
            "output_url": f"{bucket}/{there}/out?X-Amz-Signature={canaries.secret('outputurl')}",
            "error_url": f"{bucket}/{there}/err?X-Amz-Signature={canaries.secret('errorurl')}",
            "webhook_url": receiver.url(f"/own?token={canaries.secret('webhookurl')}"),
            "notify_email": "canary@example.com",
        }
        with contextlib.suppress(openai.BadRequestError):
            batch = client.batches.create(
                **{"input_file_id": None, "extra_body": extra, **_for_sdk(given, extra)},
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
            ids.append(batch.id)
    assert len(ids) == 4
    return ids


def _for_sdk(given: dict[str, Any], extra: dict[str, str]) -> dict[str, Any]:
    if "input_url" in given:
        return {"extra_body": extra | given}
    return given


async def ended(client: openai.OpenAI, yard: Yard, ids: list[str]) -> None:
    """Every batch has, and everybody was told."""
    deadline = time.monotonic() + SECONDS
    while True:
        # In a thread: the bucket answers in this one, and batches wait for it.
        statuses, told = await asyncio.to_thread(standing, client, ids)
        if OVER.issuperset(statuses) and told == ["delivered"] * 3 * len(ids):
            return
        assert time.monotonic() < deadline, f"{statuses}, {told}:\n{yard.said()[-6000:]}"
        await asyncio.sleep(0.2)


def standing(client: openai.OpenAI, ids: list[str]) -> tuple[list[str], list[str]]:
    """The batches' statuses, and those of what is to be told of them."""
    statuses = [str(client.batches.retrieve(each).status) for each in ids]
    page = client.get("/deliveries?limit=100", cast_to=dict[str, Any])
    return statuses, [each["status"] for each in page["data"]]


def everything_shown(client: openai.OpenAI, yard: Yard, ids: list[str], folder: Path) -> str:
    """What the API and the commands say of the batches and of what was told of them."""
    shown = [client.batches.retrieve(each).to_json() for each in ids]
    page = client.get("/deliveries?limit=100", cast_to=dict[str, Any])
    commands = [f"batchyard show {each}{option}" for each in ids for option in ("", " --json")]
    commands += ["batchyard list --all", "batchyard webhooks list", "batchyard deliveries list"]
    for delivery in page["data"]:
        one = client.get(f"/deliveries/{delivery['id']}", cast_to=dict[str, Any])
        shown.append(json.dumps(one))
    shown.append(bash("\n".join(commands), folder, yard.operator_environment()))
    return "\n".join(shown)


def search(yard: Yard, canaries: Canaries) -> Iterator[tuple[str, set[str]]]:
    """Every file of the home, the text of every database, and every command line."""
    objects = yard.home / "objects"
    for path in yard.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            of = canaries.secrets if objects in path.parents else None
            with contextlib.suppress(FileNotFoundError):
                yield str(path.relative_to(yard.folder)), found_in(canaries, path.read_bytes(), of)
    for path in (yard.home / "batchyard.db", yard.home / "prefect" / "prefect.db"):
        # A value that is longer than a page of the file is in pieces there.
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            text = "\n".join(database.iterdump())
        assert "batch_" in text
        yield f"{path.name} as text", found_in(canaries, text.encode())
    for pid in yard.process_ids():
        with contextlib.suppress(FileNotFoundError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            yield f"command line of {pid}", found_in(canaries, words)


def found_in(canaries: Canaries, content: bytes, of: dict[str, str] | None = None) -> set[str]:
    return canaries.in_bytes(content, of=canaries.secrets | canaries.prompts if of is None else of)


def test_the_search_finds_what_is_there(yard: Yard, canaries: Canaries) -> None:
    """A word that is meant to be everywhere, plainly and in base64."""
    word = "tiny-chat"
    canaries.secrets = {"model": word}
    names = {name for name, places in search(yard, canaries) if places}
    assert {"batchyard.db as text", "prefect.db as text", "home/logs/gpu.log"} <= names
    encoded = base64.b64encode(b"user: " + SMTP_PASSWORD.encode() + b"\n")
    canaries.secrets = {"smtppassword": SMTP_PASSWORD}
    assert found_in(canaries, encoded) == {"smtppassword"}
