"""Plots are SVG that a browser can read, and the same for the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from benchmarks import plot
from benchmarks.plot import Bar, bars, lines

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [Bar("first", "theirs & others", 10.0), Bar("first", "ours", 40.0, is_ours=True)]


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own


def test_a_bar_is_as_long_as_its_value() -> None:
    found = drawn(bars("Rates", ROWS))
    theirs, ours = (float(rect.attrib["width"]) for rect in found.iter(f"{SVG}rect"))
    assert round(ours / theirs) == 4


def test_every_bar_has_its_name_and_its_value_and_every_group_a_heading() -> None:
    found = drawn(bars("Rates", ROWS, unit=" %"))
    texts = [text.text for text in found.iter(f"{SVG}text")]
    assert texts == ["Rates", "first", "theirs & others", "10 %", "ours", "40 %"]


def test_each_series_is_a_line_through_its_points() -> None:
    series = {"ours": [(10.0, 1.0), (1000.0, 2.0)], "theirs": [(10.0, 5.0)]}
    found = drawn(lines("Memory", series, x_name="lines", y_name="MiB", log_x=True))
    points = [line.attrib["points"].split() for line in found.iter(f"{SVG}polyline")]
    assert [len(each) for each in points] == [2, 1]


def test_the_same_values_give_the_same_bytes() -> None:
    assert bars("Rates", ROWS) == bars("Rates", list(ROWS))


def test_a_saved_plot_is_shown_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "FOLDER", tmp_path)
    assert plot.save("plan_gain", "<svg/>") == "![plan gain](plots/plan_gain.svg)"
    assert (tmp_path / "plan_gain.svg").read_text() == "<svg/>"
