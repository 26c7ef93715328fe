"""Whatever offers the options of a batch reads them from one table."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.batch_options import OPTIONS, Door, as_fields, describe_parameters, options_of
from batchyard.steps.create.create import BatchRequest, request_of

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


def test_a_row_without_the_door_of_a_command_is_no_option_of_it(found: dict[str, Any]) -> None:
    assert found["estimate"] == ["favourite_song"]


def test_the_pages_form_has_a_field_for_each_option_that_says_so() -> None:
    form = (ROOT / "batchyard/page/templates/estimate.html").read_text()
    fields = set(re.findall(r'name="(\w+)"', form)) - {"csrf", "form_key"}
    assert fields == {option.name for option in options_of(Door.PAGE)}


NO_OPTIONS = {
    # Where the files are, which each way in says in its own way.
    *("input", "input_file_id", "input_file_ids", "output", "error"),
    # Who asks: the way in itself knows it.
    *("public_urls", "any_body", "message_requests", "mixed_models", "is_inline", "traceparent"),
}


def test_whatever_may_be_asked_of_a_batch_is_a_row_which_says_its_ways_in() -> None:
    stages = [{"endpoint": "e", "template": "t"}]
    values = {"then": stages, "output_expires_after": "1h"}
    asked = request_of({option.name: values.get(option.name, "x") for option in OPTIONS})
    default = BatchRequest()
    set_by_rows = {
        each.name
        for each in fields(BatchRequest)
        if getattr(asked, each.name) != getattr(default, each.name)
    }
    assert set_by_rows | NO_OPTIONS == {each.name for each in fields(BatchRequest)}
    assert all(option.doors for option in OPTIONS)


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
