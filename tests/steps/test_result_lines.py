"""Result lines are put in the order of their requests, each once, with few reads."""

from __future__ import annotations

import os
import random
import tracemalloc
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest

from batchyard.results.results import Outcome, ResultLine
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import encode_entry
from batchyard.steps.collect import result_lines
from batchyard.steps.collect.result_lines import ResultLines
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from pathlib import Path

USAGE = TokenUsage(3, 1, 2, 0, 5)


def entry(ordinal: int, text: str = "", *, is_error: bool = False, is_copy: bool = False) -> bytes:
    outcome = Outcome.ERROR if is_error else Outcome.OUTPUT
    return encode_entry(ordinal, ResultLine(outcome, line(ordinal, text), USAGE, is_copy))


def line(ordinal: int, text: str = "") -> bytes:
    return f"{ordinal} {text}\n".encode()


async def joined(lines: ResultLines, outcome: Outcome) -> bytes:
    return b"".join([part async for part in lines.parts(outcome)])


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_lines, "_RUN_BYTES", 4096)
    monkeypatch.setattr(result_lines, "_LOOK_REQUESTS", 700)


async def test_lines_come_in_the_order_of_the_requests_however_they_were_finished(
    tmp_path: Path, small_runs: None
) -> None:
    order = random.Random(5).sample(range(3000), 2500)
    is_error = {ordinal for ordinal in order if ordinal % 7 == 0}
    texts = {ordinal: "x" * (ordinal % 40) for ordinal in order}
    with ResultLines(tmp_path, 3000) as lines:
        for first in range(0, len(order), 110):
            segment = b"".join(
                entry(each, texts[each], is_error=each in is_error)
                for each in order[first : first + 110]
            )
            assert await lines.add_segment(segment)
        output, errors = [await joined(lines, each) for each in Outcome]
        counts = lines.counts()
    in_order = sorted(order)
    assert output == b"".join(line(each, texts[each]) for each in in_order if each not in is_error)
    assert errors == b"".join(line(each, texts[each]) for each in in_order if each in is_error)
    assert (counts.total, counts.completed) == (3000, 2500 - len(is_error))
    assert counts.failed == len(is_error)
    assert lines.usage == TokenUsage(*(2500 * each for each in USAGE))
    assert not os.listdir(tmp_path)  # noqa: PTH208 - an async function


async def test_of_two_lines_of_one_request_the_first_counts(tmp_path: Path) -> None:
    with ResultLines(tmp_path, 3) as lines:
        await lines.add_segment(entry(1, "first") + entry(0) + entry(1, "again", is_copy=True))
        await lines.add_segment(entry(1, "late", is_copy=True) + entry(2, is_copy=True))
        assert await joined(lines, Outcome.OUTPUT) == line(0) + line(1, "first") + line(2)
        assert (lines.copies, lines.usage.total_tokens) == (1, 15)


async def test_lines_of_requests_that_were_not_run_stand_among_the_others(
    tmp_path: Path, small_runs: None
) -> None:
    with ResultLines(tmp_path, 1000) as lines:
        await lines.add_segment(entry(500, "bad", is_error=True) + entry(1))
        left = [each for each in range(1000) if not lines.has_line(each)]
        await lines.add_errors((each, line(each, "not run")) for each in left)
        errors = await joined(lines, Outcome.ERROR)
    assert errors.splitlines(keepends=True) == [
        line(each, "bad" if each == 500 else "not run") for each in range(1000) if each != 1
    ]


async def test_each_part_is_read_in_a_piece_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second line is an error, and the requests are finished in any order."""
    monkeypatch.setattr(result_lines, "_RUN_BYTES", 16_000)
    monkeypatch.setattr(result_lines, "_READ_BYTES", 1000)
    reads = []

    def counted(descriptor: int, size: int, place: int) -> bytes:
        reads.append(size)
        return pread(descriptor, size, place)

    pread = os.pread
    monkeypatch.setattr(os, "pread", counted)
    order = random.Random(5).sample(range(2000), 2000)
    with ResultLines(tmp_path, 2000) as lines:
        segments = [order[first : first + 50] for first in range(0, 2000, 50)]
        for segment in segments:
            await lines.add_segment(
                b"".join(entry(n, "x" * 40, is_error=n % 2 == 0) for n in segment)
            )
        files = [await joined(lines, each) for each in Outcome]
    size = sum(map(len, files))
    assert sum(reads) == size + 8 * 2000
    runs = size // 16_000 + 1
    assert len(reads) <= 2 * runs * (runs + 1)


async def test_runs_grow_with_the_square_root_of_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_lines, "_RUN_BYTES", 1000)
    monkeypatch.setattr(result_lines, "_READ_BYTES", 100)
    with ResultLines(tmp_path, 1600) as lines:
        sizes = []
        for ordinal in range(1600):
            await lines.add_segment(entry(ordinal, "x" * 87))
            sizes.append(lines.run_bytes)
        assert await joined(lines, Outcome.OUTPUT) == b"".join(
            line(n, "x" * 87) for n in range(1600)
        )
    assert sizes == sorted(sizes)
    assert sizes[:80] == [1000] * 80
    assert 1.9 < sizes[1599] / sizes[399] < 2.1


async def test_a_request_costs_a_byte_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a run and what is looked at together, however many requests have a line."""
    monkeypatch.setattr(result_lines, "_RUN_BYTES", 50_000)
    monkeypatch.setattr(result_lines, "_READ_BYTES", 0)
    monkeypatch.setattr(result_lines, "_LOOK_REQUESTS", 5000)

    async def peak_bytes(count: int) -> int:
        order = random.Random(5).sample(range(count), count)
        segments = [
            b"".join(map(entry, order[first : first + 500])) for first in range(0, count, 500)
        ]
        tracemalloc.start()
        try:
            with ResultLines(tmp_path, count) as lines:
                for segment in segments:
                    await lines.add_segment(segment)
                async for _ in lines.parts(Outcome.OUTPUT):
                    pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = await peak_bytes(10_000), await peak_bytes(50_000)
    assert many - few < 2 * 40_000


async def test_a_file_that_was_cut_short_gives_no_wrong_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ResultLines(tmp_path, 2) as lines:
        await lines.add_segment(entry(0) + entry(1))
        monkeypatch.setattr(os, "pread", lambda *_: b"0")
        with pytest.raises(OSError, match="shorter"):
            await joined(lines, Outcome.OUTPUT)


@pytest.mark.parametrize("cut", range(0, 90, 7))
def test_headers_are_the_entries_as_far_as_a_segment_is_whole(cut: int) -> None:
    entries = [entry(2, "a", is_copy=True), entry(0, "bc", is_error=True), entry(1)]
    ends = list(accumulate(map(len, entries), initial=0))
    found = decode_headers(b"".join(entries)[:cut], 3)
    whole = sum(end <= cut for end in ends[1:])
    assert found.headers["ordinal"].tolist() == [2, 0, 1][:whole]
    assert (
        found.headers["outcome"].tolist() == [Outcome.OUTPUT, Outcome.ERROR, Outcome.OUTPUT][:whole]
    )
    assert found.headers["usage"].tolist() == [list(USAGE)] * whole
    assert found.is_copy.tolist() == [True, False, False][:whole]
    assert found.lines() == [line(2, "a"), line(0, "bc"), line(1)][:whole]
    assert found.is_whole == (cut in ends)


@pytest.mark.parametrize(
    "damage",
    [bytes(29), entry(3), entry(1)[:4] + b"\x02" + entry(1)[5:]],
    ids=["zeros", "unknown request", "unknown outcome"],
)
def test_what_comes_after_damage_is_left_out(damage: bytes) -> None:
    found = decode_headers(entry(0) + damage + entry(2), 3)
    assert found.headers["ordinal"].tolist() == [0]
    assert not found.is_whole
