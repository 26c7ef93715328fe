"""Everything that must know an endpoint reads it from one table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub_answers import ANSWERS
from batchyard.lines.endpoints import ENDPOINTS, LIVE, takes_form
from tests.unit.endpoint_readers import READERS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def knows() -> dict[str, Any]:
    """Reader → whether it knows two endpoints that are only rows of the table."""
    program = [sys.executable, "-m", "tests.unit.endpoint_readers"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_new_row_is_a_new_endpoint_for_every_reader(
    knows: dict[str, Any], reader: Callable[[], bool]
) -> None:
    assert knows.get(reader.__name__) is True


def test_the_stub_answers_every_endpoint_that_is_offered() -> None:
    assert ANSWERS.keys() == {*ENDPOINTS, *LIVE}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_page_about_input_files_names_every_endpoint(path: str) -> None:
    page = (ROOT / "docs" / "input-format.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `/")]
    assert path in {named for row in rows for named in re.findall(r"`(/[^`]+)`", row)}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_endpoint_takes_a_form_exactly_if_a_line_may_name_a_file(path: str) -> None:
    named = any("file_url" in choice for choice in ENDPOINTS[path].required)
    assert takes_form(path) is named
