"""A server that answers as another one was recorded to."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.engines.questions import QUESTIONS, RECORDED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))


@dataclass
class Recording:
    """What one server was seen to say, or says by its source."""

    content: dict[str, Any]
    url: str = ""
    asked: list[str] = field(default_factory=list)

    @classmethod
    def named(cls, name: str) -> Recording:
        return cls(json.loads((RECORDED / f"{name}.json").read_text()))

    @property
    def model(self) -> str:
        model: str = self.content["model"]
        return model

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.content["answers"]
        return found

    def url_of(self, title: str) -> str:
        """The endpoint that was asked."""
        questions = QUESTIONS[self.content["sort"]]
        return questions[title if title in questions else next(iter(questions))][0]

    async def look(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        page = self.content["looks"].get(request.path)
        return _response(page) if page else web.json_response({"detail": "Not Found"}, status=404)

    async def answer(self, request: web.Request) -> web.Response:
        """The body names the question."""
        self.asked.append(request.path)
        return _response(self.answers[(await request.json())["question"]])


@contextlib.asynccontextmanager
async def played(recording: Recording) -> AsyncIterator[Recording]:
    app = web.Application()
    app.router.add_get("/{path:.*}", recording.look)
    app.router.add_post("/{path:.*}", recording.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recording.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield recording
    finally:
        await runner.cleanup()


def body_of(page: dict[str, Any]) -> bytes:
    return json.dumps(page["json"]).encode() if "json" in page else page["text"].encode()


def _response(page: dict[str, Any]) -> web.Response:
    kind = "application/json" if "json" in page else "text/plain"
    return web.Response(status=page["status"], body=body_of(page), content_type=kind)
