"""Input files, seeded: the same numbers give the same bytes."""

from __future__ import annotations

import itertools
import json
import math
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


def short_requests(
    path: Path,
    *,
    count: int,
    model: str,
    seed: int,
    max_tokens: int = 8,
    words_each: int = 40,
) -> Path:
    """Uniform short chat requests that share nothing but the template."""
    rng = random.Random(seed)
    return _write(
        path,
        (
            chat(f"short-{n}", model, [("user", words(rng, words_each))], max_tokens=max_tokens)
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


def few_shot_templates(
    path: Path, *, templates: int, inputs: int, words_each: int, model: str, seed: int
) -> Path:
    """Templates of six examples, as turns of the chat, each with many inputs; shuffled."""
    rng = random.Random(seed)
    lines = []
    for template in range(templates):
        messages = [("system", f"Do as in the examples. {words(rng, 20)}")]
        for _ in range(6):
            messages.append(("user", words(rng, words_each // 8)))
            messages.append(("assistant", words(rng, words_each // 24)))
        lines += [
            chat(
                f"template-{template}-input-{number}",
                model,
                [*messages, ("user", words(rng, 15))],
                max_tokens=8,
            )
            for number in range(inputs)
        ]
    rng.shuffle(lines)
    return _write(path, lines)


def four_level_tree(
    path: Path, *, branches: tuple[int, int, int, int], words_each: int, model: str, seed: int
) -> Path:
    """A house's rules, a product's manual, a chapter and a question; shuffled.

    ``branches``: how many of each there are under one of the level above.
    """
    rng = random.Random(seed)

    def below(level: int, above: str) -> list[str]:
        if level == len(branches):
            return [above]
        # The lower, the longer, as in texts; the question at the end is short.
        count = 10 if level == len(branches) - 1 else words_each * (level + 1) // 6
        texts = [f"{above}\n{words(rng, count)}" for _ in range(branches[level])]
        return [leaf for text in texts for leaf in below(level + 1, text)]

    lines = [
        chat(f"leaf-{number}", model, [("user", text)], max_tokens=8)
        for number, text in enumerate(below(0, "Answer from what follows."))
    ]
    rng.shuffle(lines)
    return _write(path, lines)


def long_requests(path: Path, *, count: int, words_each: int, model: str, seed: int) -> Path:
    """Long prompts that share nothing but the template."""
    rng = random.Random(seed)
    return _write(
        path,
        (
            chat(f"long-{n}", model, [("user", words(rng, words_each))], max_tokens=8)
            for n in range(count)
        ),
    )


def heavy_tailed_requests(
    path: Path, *, count: int, median_tokens: int, most_tokens: int, model: str, seed: int
) -> Path:
    """Short prompts whose answers' lengths are log-normal (sigma 1), cut at ``most_tokens``."""
    rng = random.Random(seed)

    def tokens() -> int:
        return max(1, min(most_tokens, round(rng.lognormvariate(math.log(median_tokens), 1.0))))

    return _write(
        path,
        (
            chat(f"tail-{n}", model, [("user", words(rng, 10))], max_tokens=tokens())
            for n in range(count)
        ),
    )


def padded_requests(path: Path, *, count: int, line_bytes: int, model: str, seed: int) -> Path:
    """Requests of about ``line_bytes`` a line, fast to make: one text, cut elsewhere each time."""
    rng = random.Random(seed)
    content_bytes = max(16, line_bytes - 220)
    text = words(rng, content_bytes)
    lines = (
        chat(f"padded-{n}", model, [("user", text[start : start + content_bytes])], max_tokens=8)
        for n, start in enumerate(rng.randrange(content_bytes) for _ in range(count))
    )
    return _write(path, lines)


def first_lines(path: Path, *, of: Path, count: int) -> Path:
    """The first ``count`` lines of another file, for those who would take too long over it."""
    with of.open() as whole, path.open("w") as part:
        part.writelines(itertools.islice(whole, count))
    return path


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
