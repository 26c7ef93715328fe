"""Pages in Prometheus' text format, merged: valid whatever an engine says, in little time."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from batchyard.metrics.exporter.text import MAX_LINE_CHARACTERS, MAX_LINES, Added, MergedPage
from batchyard.metrics.metric_families import READY, RETRIES

ZERO, ONE = {"batchyard_engine": "0"}, {"batchyard_engine": "1"}
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 2.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 1.5
"""


def merged(*pages: str) -> str:
    page = MergedPage()
    for number, text in enumerate(pages):
        page.add(text, {"batchyard_engine": str(number)})
    return str(page)


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """What Prometheus' own client reads from the page."""
    return [(one.name, one.labels, one.value) for each in parsed(text) for one in each.samples]


def test_each_family_is_described_once_and_each_sample_says_whose_it_is() -> None:
    text = merged(VLLM, VLLM)
    assert text.count("# TYPE") == text.count("# HELP") == 2
    running = [each for each in samples(text) if each[0] == "vllm:num_requests_running"]
    own = {"engine": "0", "model_name": "m"}
    assert running == [
        ("vllm:num_requests_running", {"batchyard_engine": each, **own}, 3.0) for each in "01"
    ]
    assert len(samples(text)) == 8


def test_the_samples_of_a_family_stand_together() -> None:
    """Prometheus' format demands it."""
    lines = [line for line in merged(VLLM, VLLM).splitlines() if not line.startswith("#")]
    names = [line.partition("{")[0].partition("_seconds_")[0] for line in lines]
    assert names == sorted(names, reverse=True)


def test_labels_and_values_of_every_form_are_passed_on() -> None:
    page = MergedPage()
    text = 'a{x="\\"\\\\\\n,}"} +Inf\nb 1e-3\nc{} NaN\nd{x="é",} -2 1700000000000\ne .5\n'
    assert page.add(text, ZERO) == Added(samples=5)
    found = {name: (labels, value) for name, labels, value in samples(str(page))}
    assert found["a"] == ({"x": '"\\\n,}'} | ZERO, float("inf"))
    assert found["b"] == (ZERO, 0.001)
    assert found["d"] == ({"x": "é"} | ZERO, -2.0)
    assert "1700000000000" not in str(page)


def test_labels_of_ours_are_escaped() -> None:
    page = MergedPage()
    page.put(READY, [("", {"model": 'a"b\\c\nd'}, 1)])
    assert samples(str(page)) == [(READY.name, {"model": 'a"b\\c\nd'}, 1.0)]


def test_a_metric_of_ours_without_a_sample_is_not_there() -> None:
    page = MergedPage()
    page.put(RETRIES, [])
    assert str(page) == ""


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a one",
        "a 1 2 3",
        "a 1e999",
        "a 1_000",
        "a 0x1p3",
        "a +NaN",
        "1a 1",
        "a{x=1} 1",
        'a{x="1} 1',
        'a{x="1"',
        'a{x="\\t"} 1',
        'a{x="1" y="2"} 1',
        'a{x="1",x="2"} 1',
        'a{__name__="b"} 1',
        'a{"quoted"} 1',
        'a{x="\x00"} 1',
        'a{batchyard_engine="9"} 1',
        "batchyard_engine_inflight 9",
        "# TYPE batchyard_engine_inflight gauge",
        "# TYPE a tomato",
        "<html>",
        "a " + "1" * MAX_LINE_CHARACTERS,
    ],
)
def test_a_line_that_is_not_valid_or_not_the_engines_is_left_out(line: str) -> None:
    page = MergedPage()
    assert page.add(f"good 1\n{line}\nbetter 2\n", ZERO) == Added(samples=2, refused=1)
    assert [name for name, _, _ in samples(str(page))] == ["good", "better"]


def test_a_family_of_another_type_than_before_is_left_out() -> None:
    """One name with two types would make Prometheus refuse the page."""
    page = MergedPage()
    page.add("# TYPE a counter\na 1\n", ZERO)
    assert page.add("# TYPE a gauge\na 2\n", ONE) == Added(refused=2)
    assert page.add("a 3\n", ONE) == Added(refused=1)
    assert [value for _, _, value in samples(str(page))] == [1.0]


def test_a_sample_that_only_looks_like_one_of_a_histogram_is_left_out() -> None:
    page = MergedPage()
    page.add(VLLM, ZERO)
    count = "vllm:e2e_request_latency_seconds_count"
    assert page.add(f"# TYPE {count} counter\n{count} 1\n", ONE) == Added(refused=2)


def test_comments_and_empty_lines_are_no_samples() -> None:
    assert MergedPage().add("# just words\n\n#\n# EOF\n", ZERO) == Added()


def test_a_page_without_end_is_cut_off() -> None:
    added = MergedPage().add("a 1\n" * (MAX_LINES + 5), ZERO)
    assert added.samples == MAX_LINES


@pytest.mark.parametrize(
    "line",
    [
        'a{x="' + '\\"' * 8000,
        "a{" + 'x="",' * 3000,
        "a{" + 'x="' * 4000,
        "a" * 16000,
        "a " + "\t" * 16000,
        "a " + "1" * 16000 + "x",
    ],
)
def test_no_line_takes_long(line: str) -> None:
    """prometheus_client's parser takes time that grows with the square of such a line."""
    page = MergedPage()
    began = time.thread_time()
    page.add(f"{line}\n" * 20, ZERO)
    assert time.thread_time() - began < 1.0
