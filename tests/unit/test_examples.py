"""The examples for Prefect, where none of a batch's requests was answered."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from examples import chain_by_events, questions

if TYPE_CHECKING:
    from pathlib import Path


def unanswered(**more: Any) -> str:
    counts = {"total": 1, "completed": 0, "failed": 1}
    batch = {"batch_id": "batch_1", "request_counts": counts, "output_file_id": None}
    return json.dumps({**batch, "output": None, **more})


def test_a_second_batch_is_made_of_answers_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`batchyard results` would refuse, and an empty file would be a batch that fails."""

    def batchyard(*words: str) -> str:
        assert words == ("show", "batch_1", "--json")
        return unanswered(metadata={"stage": "generate"})

    monkeypatch.setattr(chain_by_events, "batchyard", batchyard)
    monkeypatch.setattr(chain_by_events, "start_batch", pytest.fail)
    asyncio.run(chain_by_events.judge.fn("batch_1", "judge-model", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


async def test_questions_without_an_answer_are_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = SimpleNamespace(is_completed=lambda: True)

    async def run(*_: object, **__: object) -> object:
        return SimpleNamespace(id="run", state=state)

    async def get(_: str) -> object:
        return SimpleNamespace(data=unanswered())

    monkeypatch.setattr(questions, "arun_deployment", run)
    monkeypatch.setattr(questions, "Artifact", SimpleNamespace(aget=get))
    monkeypatch.setattr(questions, "prepare", questions.prepare.fn)
    monkeypatch.setattr(questions, "answers_in", questions.answers_in.fn)
    assert await questions.ask.fn(["Why?"], "tiny-chat", str(tmp_path)) == {}
