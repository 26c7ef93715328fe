"""The page about clients: its code finds every line, in each way in which a batch can end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pages import block

FINDINGS = Path(__file__).parents[1] / "findings"


@pytest.mark.parametrize(
    ("status", "answered", "codes"),
    [
        ("completed", {"0", "2"}, {"1": "context_length_exceeded"}),
        ("expired", {"0"}, {"1": "batch_expired", "2": "batch_expired"}),
        ("cancelled", {"0"}, {"1": "batch_cancelled", "2": "batch_cancelled"}),
    ],
)
def test_the_pages_code_finds_every_line_by_its_id(
    status: str, answered: set[str], codes: dict[str, str]
) -> None:
    spec = importlib.util.spec_from_file_location("batch_api", FINDINGS / "batch_api.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(batch_api := importlib.util.module_from_spec(spec))
    names: dict[str, Any] = {"json": json}
    exec(block("docs/how-to/client-libraries.md", "join"), names)  # noqa: S102 - our own page
    with openai.OpenAI(api_key="none", base_url=batch_api.serve(status)) as client:
        found = names["results"](client, client.batches.retrieve("batch_1"))
    assert {name for name, (answer, error) in found.items() if answer and error is None} == answered
    errors = {name: error for name, (answer, error) in found.items() if answer is None}
    assert {name: error.get("error", error)["code"] for name, error in errors.items()} == codes
