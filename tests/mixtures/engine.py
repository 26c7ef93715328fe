"""A stub engine that does what the words of a request say, and answers with :func:`reply`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from batchyard.engine.base import http_answer
from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.stub.stub_answers import error_body
from tests.mixtures import lines

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.engine.base import EngineAnswer, EngineRequest

_SECONDS = 0.03
_SLOW_SECONDS = 0.6


class WordedEngine(StubEngine):
    def __init__(self, model: str, *, log_path: Path) -> None:
        super().__init__(
            model,
            adapters=[lines.ADAPTER],
            max_num_seqs=8,
            latency=lambda body: _SLOW_SECONDS if lines.SLOW.encode() in body else _SECONDS,
            keep_log=False,
            log_path=log_path,
        )
        self._refused_once: set[str] = set()

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        answer = await super().answer(request, timeout_seconds=timeout_seconds)
        if answer.status != 200:
            return answer
        asked = json.loads(request.body)
        words = lines.words_in(asked)
        if lines.REFUSED in words:
            return http_answer(request.tag, 400, error_body(400))
        if words not in self._refused_once:
            self._refused_once.add(words)
            if lines.FLAKY in words:
                return http_answer(request.tag, 500, error_body(500))
            if lines.BUSY in words:
                return http_answer(request.tag, 429, error_body(429), 0.1)
        said = json.loads(answer.body)
        said = lines.with_reply(request.url, said, lines.reply(asked["model"], words))
        if "choices" in said:
            is_enough = asked.get("max_tokens", 0) >= lines.ENOUGH_TOKENS
            is_cut = lines.ALWAYS_CUT in words or (lines.CUT in words and not is_enough)
            said["choices"][0]["finish_reason"] = "length" if is_cut else "stop"
        return replace(answer, body=json.dumps(said).encode())
