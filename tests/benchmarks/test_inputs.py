"""Benchmark files: the same seed gives the same bytes, and they share what they are to share."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks import inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAKERS = {
    "short": partial(inputs.short_requests, count=12),
    "long": partial(inputs.long_requests, count=12, words_each=50),
    "documents": partial(inputs.document_questions, documents=3, questions=4, words_each=50),
    "few-shot": partial(inputs.few_shot_templates, templates=3, inputs=4, words_each=50),
    "tree": partial(inputs.four_level_tree, branches=(1, 2, 2, 3), words_each=60),
    "tail": partial(inputs.heavy_tailed_requests, count=12, median_tokens=8, most_tokens=16),
    "padded": partial(inputs.padded_requests, count=12, line_bytes=500),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_file_has_its_lines_and_the_same_seed_gives_the_same_bytes(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    first = make(tmp_path / "first", model="m", seed=1).read_bytes()
    again = make(tmp_path / "again", model="m", seed=1).read_bytes()
    other = make(tmp_path / "other", model="m", seed=2).read_bytes()
    names = {json.loads(line)["custom_id"] for line in first.splitlines()}
    assert len(names) == first.count(b"\n") == 12
    assert first == again
    assert first != other


def prompts(path: Path) -> list[str]:
    lines = map(json.loads, path.read_text().splitlines())
    return sorted(line["body"]["messages"][-1]["content"] for line in lines)


def common(texts: list[str]) -> int:
    """How many characters all of them begin with."""
    return len(
        list(itertools.takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))
    )


def test_leaves_of_the_tree_share_what_is_above_them(tmp_path: Path) -> None:
    found = prompts(MAKERS["tree"](tmp_path / "tree", model="m", seed=1))
    siblings, everybody = common(found[:3]), common(found)
    assert everybody > 20
    assert siblings > 3 * everybody


def test_lengths_of_answers_have_a_tail_that_is_cut(tmp_path: Path) -> None:
    make = partial(inputs.heavy_tailed_requests, median_tokens=64, most_tokens=512)
    lines = map(
        json.loads,
        make(tmp_path / "tail", count=2000, model="m", seed=1).read_text().splitlines(),
    )
    tokens = sorted(line["body"]["max_tokens"] for line in lines)
    assert 56 <= tokens[1000] <= 72
    assert tokens[-1] == 512


def test_padded_lines_are_as_long_as_is_asked_for(tmp_path: Path) -> None:
    path = inputs.padded_requests(tmp_path / "in", count=20, line_bytes=4000, model="m", seed=1)
    assert abs(path.stat().st_size / 20 - 4000) < 40


def test_the_first_lines_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    whole = MAKERS["short"](tmp_path / "whole", model="m", seed=1)
    part = inputs.first_lines(tmp_path / "part", of=whole, count=5)
    assert part.read_text().splitlines() == whole.read_text().splitlines()[:5]
