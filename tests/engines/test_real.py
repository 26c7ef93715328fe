"""Real servers still answer as they were recorded, and run a batch: `make test-engines`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import EngineRequest
from batchyard.engine.remote.remote import RemoteEngine
from tests.engines.environments import SERVERS, running
from tests.engines.playback import Recording
from tests.engines.questions import QUESTIONS, answers_of, kept
from tests.engines.test_recorded import KIND_OF, SEATS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.engine.base import EngineAnswer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
LINES = 40


@pytest.fixture(scope="module", params=sorted(SERVERS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Its name and its URL."""
    name: str = request.param
    with running(name, tmp_path_factory.mktemp(name)) as url:
        yield name, url


def members(page: dict[str, Any]) -> list[str] | None:
    """What stands at the top of an answer."""
    content = page.get("json")
    return sorted(content) if isinstance(content, dict) else None


def test_it_answers_as_it_was_recorded(server: tuple[str, str]) -> None:
    """If it does not any more, record it again and read what differs."""
    name, url = server
    recording = Recording.named(name).content
    answers = answers_of(url, recording["model"], recording["sort"])
    pages = {title: kept(*answer) for title, answer in answers.items()}
    seen = {title: (page["status"], members(page)) for title, page in pages.items()}
    assert seen == {
        title: (page["status"], members(page)) for title, page in recording["answers"].items()
    }


async def test_it_is_recognised_and_answers_every_request_once(server: tuple[str, str]) -> None:
    name, url = server
    recording = Recording.named(name).content
    path, fields = next(iter(QUESTIONS[recording["sort"]].values()))
    body = json.dumps({"model": recording["model"], **fields}).encode()

    async def requests() -> AsyncIterator[EngineRequest]:
        for tag in range(LINES):
            yield EngineRequest(tag, path, body, f"req_{tag:032x}")

    engine = RemoteEngine(url, recording["model"], exclusive=True)
    await engine.start()
    answers: list[EngineAnswer] = [
        answer async for answer in engine.stream(requests(), timeout_seconds=300)
    ]
    await engine.stop()
    assert (engine.kind.name, engine.max_num_seqs) == (KIND_OF[name], SEATS[name])
    assert sorted(answer.tag for answer in answers) == list(range(LINES))
    assert {answer.status for answer in answers} == {200}
