"""Every endpoint in one file, those that the engine lacks, and lines that name files."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.engine.stub.stub_answers import ANSWERS, read_form
from batchyard.errors import EngineLost
from batchyard.lifecycle import BatchStatus
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.runner.chunk import attachments
from tests.steps.conftest import Yard, chat_line
from tests.unit.storage.web_server import gives, running_web_server, says

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.storage.web_server import WebServer

AUDIO = "/v1/audio/transcriptions"
WAV = b"RIFF\r\n\x00\xff" * 1000
DATA_URL = "data:audio/wav;base64," + base64.b64encode(WAV).decode()


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with running_web_server() as running:
        running.answers = [gives(WAV)]
        yield running


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    body = {"model": "stub-model", **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def audio(custom_id: str, file_url: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, AUDIO, file_url=file_url, **body)


async def test_every_endpoint_of_the_engine_is_answered(yard: Yard) -> None:
    """In one file, each with no more than the fields that it must have."""
    fields = {url: dict.fromkeys(it.required[0], "x") for url, it in ENDPOINTS.items()}
    # The stub also counts the tokens of live requests, which is no endpoint of a batch.
    served = [url for url in ANSWERS if url in ENDPOINTS]
    for url in served:
        fields[url] |= {"file_url": DATA_URL} if "file_url" in fields[url] else {}
        fields[url] |= {"documents": ["x", "y"]} if "documents" in fields[url] else {}
        fields[url] |= {"max_tokens": 4} if "max_tokens" in fields[url] else {}

    batch = await yard.run([line(url, url, **fields[url]) for url in served])

    results = await yard.results(batch.output_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert {result["custom_id"] for result in results} == set(served)
    assert batch.usage.input_tokens > 0


@pytest.fixture
def engine_without_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub serves every endpoint; here it lacks those of a model that pools."""
    for path in ("/classify", "/pooling", "/v1/classify", "/v1/pooling"):
        monkeypatch.delitem(ANSWERS, path)


@pytest.mark.usefixtures("engine_without_pooling")
async def test_an_endpoint_that_the_engine_lacks_gets_error_lines_and_no_attempts(
    yard: Yard,
) -> None:
    """404 in OpenAI's shape, with what is there instead; the other lines go on."""
    batch = await yard.run(
        [
            *(line(f"lacking-{n}", "/classify", input="x") for n in range(30)),
            chat_line("served"),
        ]
    )

    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.counts.completed, batch.counts.failed) == (1, 30)
    assert yard.engine.executed == 1
    assert {one["error"] for one in errors} == {None}
    assert {one["response"]["status_code"] for one in errors} == {404}
    error = errors[0]["response"]["body"]["error"]
    assert error["code"] == "endpoint_not_served"
    assert "does not serve /classify. It serves: /rerank, /score, /v1/audio" in error["message"]
    assert "/classify" not in error["message"].partition("It serves")[2]


@pytest.mark.usefixtures("engine_without_pooling")
@pytest.mark.parametrize("says_nothing", [True, False])
async def test_an_engine_that_does_not_say_what_it_serves_is_asked(
    yard: Yard, says_nothing: bool
) -> None:
    """Its own 404 is the line's answer."""

    class Silent(StubEngine):
        async def routes(self) -> Any:
            if says_nothing:
                return None
            raise EngineLost("it is too busy to say")

    yard.use(Silent())

    batch = await yard.run([line("a", "/classify", input="x"), chat_line("b")])

    (error,) = await yard.results(batch.error_file_id)
    assert error["response"]["body"] == {"detail": "Not Found"}
    assert (yard.engine.executed, batch.counts.completed) == (2, 1)


async def test_files_are_not_fetched_for_an_endpoint_that_the_engine_lacks(
    yard: Yard, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.set(allow_private_urls=True)
    monkeypatch.delitem(ANSWERS, AUDIO)

    batch = await yard.run([audio("a", server.url("/a.wav"))])

    (error,) = await yard.results(batch.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "endpoint_not_served"
    assert server.requests == []


async def test_the_engine_gets_a_form_with_the_file_in_it(yard: Yard, server: WebServer) -> None:
    """However the line names it."""
    yard.set(allow_private_urls=True)

    batch = await yard.run(
        [
            audio("url", server.url("/talk.wav?signature=s"), temperature=0.5, language="de"),
            audio("data", DATA_URL),
        ]
    )

    forms = [read_form(request.body, request.content_type) for request in yard.engine.log]
    by_url, by_data = sorted(forms, key=len, reverse=True)
    assert by_url == {
        "model": (None, b"stub-model"),
        "temperature": (None, b"0.5"),
        "language": (None, b"de"),
        "file": ("talk.wav", WAV),
    }
    assert by_data == {"model": (None, b"stub-model"), "file": ("file.wav", WAV)}
    results = await yard.results(batch.output_file_id)
    assert [result["custom_id"] for result in results] == ["url", "data"]


async def test_a_request_that_is_tried_again_keeps_its_file(yard: Yard, server: WebServer) -> None:
    yard.set(allow_private_urls=True)
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=503, times=2)]))

    batch = await yard.run([audio("a", server.url("/a.wav"))])

    assert (batch.counts.completed, yard.engine.executed, len(server.requests)) == (1, 3, 1)


async def test_an_edit_of_images_in_json_goes_to_the_engine_as_it_is(yard: Yard) -> None:
    body = {"prompt": "a hat", "images": [{"image_url": "data:image/png;base64,"}]}

    await yard.run([line("a", "/v1/images/edits", **body)])

    (request,) = yard.engine.log
    assert request.content_type == "application/json"
    assert json.loads(request.body) == {"model": "stub-model", **body}


async def test_a_file_that_cannot_be_had_is_its_own_lines_error(
    yard: Yard, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``response`` null and a code; nothing secret in the message; never a failed batch."""
    yard.set(allow_private_urls=True)
    monkeypatch.setattr(attachments, "MAX_FILE_BYTES", 10_000)
    bad = {
        "gone": server.url("/gone?signature=secret-1"),
        "large": "data:," + "x" * 10_001,
        "broken": "data:;base64,***",
        "nowhere": "http://127.0.0.1:1/x?signature=secret-1",
        "odd": "http://a..b/secret-1".replace("/secret-1", ""),
        "user": "http://user:secret-1@127.0.0.1/",
        "hostless": "http://[::1/",
    }
    server.answers = [says(404)]

    batch = await yard.run(
        [*(audio(name, url) for name, url in bad.items()), audio("good", DATA_URL)]
    )

    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert [one["custom_id"] for one in errors] == list(bad)
    assert batch.counts.completed == 1
    assert {one["response"] for one in errors} == {None}
    assert {one["error"]["code"] for one in errors} == {"file_url_unavailable"}
    reasons = [one["error"]["message"] for one in errors]
    assert "does not exist" in reasons[0]
    assert "larger than 10000 bytes" in reasons[1]
    assert "base64 is broken" in reasons[2]
    assert "cannot be reached" in reasons[3]
    assert not any("secret-1" in reason for reason in reasons)


async def test_a_file_on_an_address_that_is_not_public_is_not_fetched(
    yard: Yard, server: WebServer
) -> None:
    """Unless the operator allows it."""
    batch = await yard.run([audio("a", server.url("/a.wav")), audio("b", DATA_URL)])

    (error,) = await yard.results(batch.error_file_id)
    assert "not public" in error["error"]["message"]
    assert server.requests == []
    assert batch.counts.completed == 1
