"""The page of benchmarks: what is measured is replaced, what is written by hand stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import page
from benchmarks.__main__ import SECTIONS

if TYPE_CHECKING:
    from pathlib import Path

SMALL = (
    "before\n"
    "<!-- measured one: begin -->\nold\n<!-- measured one: end -->\n"
    "between\n"
    "<!-- measured two: begin -->\nold\n<!-- measured two: end -->\n"
    "after\n"
)


def test_the_page_has_a_place_for_every_benchmark_in_their_order() -> None:
    assert page.sections(page.PAGE.read_text()) == list(SECTIONS)


def test_the_machine_has_the_vllm_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm-version 9.8.7\n")
    python.chmod(0o700)
    monkeypatch.setattr(page, "ENGINE_PYTHON", python)
    assert page.machine().endswith("vLLM 9.8.7 (CPU).")


def test_one_section_is_replaced_and_nothing_else() -> None:
    changed = page.rewritten(SMALL, "two", "new")
    assert changed == SMALL.replace("two: begin -->\nold", "two: begin -->\nnew")


def test_a_section_that_the_page_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no section three"):
        page.rewritten(SMALL, "three", "new")


def test_a_marker_without_its_partner_is_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        page.sections(SMALL.replace("<!-- measured two: end -->\n", ""))
