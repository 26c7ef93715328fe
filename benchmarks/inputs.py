"""Input files, seeded: the same numbers give the same bytes."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_WORDS = tuple(
    f"{first}{second}"
    for first in ("ba", "ko", "li", "mu", "re", "sa")
    for second in ("ber", "con", "dal", "fen", "gor", "lim", "nas", "pit", "rug", "tov")
)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def short_requests(path: Path, *, count: int, model: str, seed: int, max_tokens: int = 8) -> Path:
    """Uniform short chat requests that share nothing but the template."""
    rng = random.Random(seed)
    return _write(
        path,
        (
            chat(f"short-{n}", model, [("user", words(rng, 40))], max_tokens=max_tokens)
            for n in range(count)
        ),
    )


def document_questions(
    path: Path, *, documents: int, questions: int, words_each: int, model: str, seed: int
) -> Path:
    """Questions on long documents, shuffled: what a pipeline that loops over questions writes."""
    rng = random.Random(seed)
    texts = [words(rng, words_each) for _ in range(documents)]
    lines = [
        chat(
            f"doc-{d}-question-{q}",
            model,
            [("system", "Answer from the document."), ("user", f"{text}\n{words(rng, 8)}?")],
            max_tokens=8,
        )
        for d, text in enumerate(texts)
        for q in range(questions)
    ]
    rng.shuffle(lines)
    return _write(path, lines)


def chat(
    custom_id: str, model: str, messages: list[tuple[str, str]], *, max_tokens: int
) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    }


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return path
