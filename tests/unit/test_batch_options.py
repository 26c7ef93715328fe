"""Whatever offers the options of a batch reads them from one table."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.batch_options import OPTIONS, as_fields, describe_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each way in makes of two options that are only rows of the table."""
    program = [sys.executable, "-m", "tests.unit.batch_option_readers"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_new_row_is_an_option_of_the_command(found: dict[str, Any], command: str) -> None:
    assert found[command] == {
        "favourite_song": ["x", "For a command."],
        "song_url": ["https://a.example", "A receiver."],
    }


def test_a_new_row_is_a_key_of_the_body(found: dict[str, Any]) -> None:
    assert found["body"] == {
        "favourite_song": ["x", "For a body."],
        "song_url": ["https://a.example", "A receiver."],
    }


def test_a_new_row_is_in_the_form_if_prefect_may_record_it(found: dict[str, Any]) -> None:
    assert found["form"] == {"favourite_song": ["", "For a form."]}


def test_an_object_is_one_in_the_form_as_well(found: dict[str, Any]) -> None:
    assert found["form_objects"] == {"on_invalid_output": ["object", {}]}


def test_what_names_a_receiver_stands_under_its_channel(found: dict[str, Any]) -> None:
    assert found["fields"] == {"favourite_song": "x", "receivers": {"file": "u"}}


def test_what_was_not_given_is_no_field() -> None:
    assert as_fields({option.name: None for option in OPTIONS}) == {"receivers": {}}


@pytest.mark.parametrize("compiled", [str, inspect.cleandoc], ids=["3.12", "3.13"])
def test_parameters_are_described_whether_python_keeps_the_indentation_or_not(
    compiled: Callable[[str], str],
) -> None:
    def function() -> None:
        """Do it.

        Args:
            own: Its own one.
            {of_batch}
        """

    assert function.__doc__ is not None
    function.__doc__ = compiled(function.__doc__)
    describe_parameters(function, ["first: One.", "second: Two."])
    assert inspect.getdoc(function) == (
        "Do it.\n\nArgs:\n    own: Its own one.\n    first: One.\n    second: Two."
    )
