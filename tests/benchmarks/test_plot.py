"""Plots are SVG that a browser can read, and the same for the same values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.plot import Bar, bars, lines

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [Bar("first", "theirs & others", 10.0), Bar("first", "ours", 40.0, is_ours=True)]


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own


def texts(found: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in found.iter(f"{SVG}text")]


def paths(found: ElementTree.Element, colour: str) -> list[list[float]]:
    """The numbers of each path that is filled or drawn in the colour."""
    of_colour = (path for path in found.iter(f"{SVG}path") if colour in path.get("style", ""))
    return [[float(number) for number in re.findall(r"[\d.]+", p.get("d", ""))] for p in of_colour]


def test_a_bar_is_as_long_as_its_value() -> None:
    found = drawn(bars("Rates", ROWS))
    (ours,), (theirs,) = paths(found, "#2f81f7"), paths(found, "#8c959f")
    assert round((max(ours[::2]) - ours[0]) / (max(theirs[::2]) - theirs[0]), 3) == 4


def test_every_bar_has_its_name_and_its_value_and_every_group_a_heading() -> None:
    found = texts(drawn(bars("Rates", ROWS, unit=" %")))
    assert sorted(found) == ["10 %", "40 %", "Rates", "first", "ours", "theirs & others"]
    assert found.index("first") < found.index("theirs & others") < found.index("ours")


def test_each_series_is_a_line_through_its_points() -> None:
    series = {"ours": [(10.0, 1.0), (1000.0, 2.0)], "theirs": [(10.0, 5.0)]}
    found = drawn(lines("Memory", series, x_name="lines", y_name="MiB", log_x=True))
    strokes = [
        len(path) // 2
        for colour in ("#2f81f7", "#d4762c")
        for path in paths(found, f"stroke: {colour}; stroke-width: 1.5")
    ]
    assert strokes == [2, 1]
    assert {"ours", "theirs", "lines", "MiB", "Memory", "10", "1,000"} <= set(texts(found))


@pytest.mark.parametrize("name", ["ours", "a name that is longer than the picture is wide " * 2])
def test_no_name_is_cut_off(name: str) -> None:
    """A name at the end of its line begins left of the edge, with room for all of it."""
    series = {name: [(1.0, 1.0), (64.0, 60.0)]}
    found = drawn(lines("Speed", series, x_name="engines", y_name="times as fast"))
    (label,) = (text for text in found.iter(f"{SVG}text") if text.text == name)
    begins = float(label.get("x", ""))
    width = float(found.get("viewBox", "").split()[2])
    assert begins + 4 * len(name) < width


def test_the_same_values_give_the_same_bytes() -> None:
    assert bars("Rates", ROWS) == bars("Rates", list(ROWS))


def test_a_saved_plot_is_shown_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "FOLDER", tmp_path)
    assert plot.save("plan_gain", "<svg/>") == "![plan gain](plots/plan_gain.svg)"
    assert (tmp_path / "plan_gain.svg").read_text() == "<svg/>"
