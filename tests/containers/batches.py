"""Batches by OpenAI's SDK: submitted, watched, and every line of their results checked."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from tests.containers.installation import wait

if TYPE_CHECKING:
    from collections.abc import Callable

    import openai
    from openai.types import Batch

LINES = 200
_END_SECONDS = 900.0


def submitted(
    client: openai.OpenAI, count: int = LINES, model: str = "tiny-chat", **options: Any
) -> Batch:
    """A batch of ``count`` chat requests with long answers."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Number {number}"}],
                "max_tokens": 80,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    ]
    content = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body=options,
    )


def is_under_way(client: openai.OpenAI, batch: Batch, story: Callable[[], str]) -> None:
    """Return when some of its lines are durable, and others are not."""

    def has_some() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    wait(has_some, "the first lines", story)
    assert client.batches.retrieve(batch.id).status == "in_progress"


def every_line_is_there_once(
    client: openai.OpenAI, batch: Batch, story: Callable[[], str], count: int = LINES
) -> None:
    """Wait for the end of the batch, and look at each of its results."""

    def has_ended() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status not in {"validating", "in_progress", "finalizing"} else None

    ended = wait(has_ended, "the end of the batch", story, _END_SECONDS)
    assert ended.status == "completed", f"{ended}\n{story()}"
    assert ended.request_counts.completed == count
    assert ended.error_file_id is None
    results = client.files.content(ended.output_file_id).text.splitlines()
    answers = [json.loads(line) for line in results]
    assert [answer["custom_id"] for answer in answers] == [f"line-{n}" for n in range(count)]
    assert {answer["response"]["status_code"] for answer in answers} == {200}
