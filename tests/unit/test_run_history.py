"""How fast a batch was, and the plot of it: values in, values out."""

from __future__ import annotations

import base64
from xml.etree import ElementTree

import pytest

from batchyard.database.columns import usage_from
from batchyard.store import ChunkSummary
from flows.shown import run_history
from flows.shown.plot import speed_plot, svg
from flows.shown.report import _rate_words
from flows.shown.run_history import Rate, RunHistory


class Clock:
    """Stands still between looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(run_history, "monotonic", lambda: self.seconds)


def chunks(answered: int, *, leased: int = 1, cached: int = 0) -> ChunkSummary:
    usage = usage_from(
        {
            "input_tokens": 10 * answered,
            "cached_tokens": cached,
            "output_tokens": 4 * answered,
            "reasoning_tokens": 0,
            "total_tokens": 14 * answered,
        }
    )
    return ChunkSummary(pending=0, leased=leased, done=0, completed=answered, failed=0, usage=usage)


def test_waiting_for_an_engine_does_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, history = Clock(monkeypatch), RunHistory()
    for _ in range(8):
        history.see(chunks(0, leased=0))
        clock.seconds += 10
    history.see(chunks(0))
    clock.seconds += 10
    history.ended = history.now
    history.see(chunks(100, cached=500))
    assert history.busy_from == 70
    speed = history.overall()
    assert speed == Rate(90, 5.0, 20.0, 0.5)


def test_a_batch_that_no_runner_had_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, history = Clock(monkeypatch), RunHistory()
    history.see(chunks(0, leased=0))
    clock.seconds += 10
    history.ended = history.now
    history.see(chunks(0, leased=0))
    assert history.overall() is None
    assert history.rates() == []


def test_a_batch_that_runs_for_days_keeps_few_samples_of_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, history = Clock(monkeypatch), RunHistory()
    for answered in range(10_000):
        history.see(chunks(answered))
        clock.seconds += 30
    assert len(history.samples) <= 240
    assert history.samples[0].seconds == 0
    assert history.samples[-1].seconds > 0.95 * 300_000


def test_the_plot_is_an_image_in_markdown() -> None:
    rates = [Rate(each, 1.0, 100.0 * each, 0.5) for each in range(1, 6)]
    head, _, encoded = speed_plot(rates).removesuffix(")").partition("base64,")
    assert head == "![Output tokens per second and hit rate](data:image/svg+xml;"
    root = ElementTree.fromstring(base64.b64decode(encoded))  # noqa: S314 - our own
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "500" in texts
    assert "cache hit rate" in texts


def test_a_batch_of_a_moment_has_no_plot() -> None:
    assert speed_plot([Rate(1, 1.0, 1.0, None)] * 2) == ""


def test_a_plot_without_any_token_is_a_plot_still() -> None:
    ElementTree.fromstring(svg([Rate(1, 1.0, 0.0, None)] * 3))  # noqa: S314 - our own


@pytest.mark.parametrize(("rate", "words"), [(1234.56, "1,234.6"), (0.0123, "0.012"), (0.0, "0.0")])
def test_a_slow_batch_has_a_speed_that_is_not_zero(rate: float, words: str) -> None:
    assert _rate_words(rate) == words
