"""docs/reference says what the code says, and explains every error code."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.notify.event import EVENT_TYPES
from batchyard.results.results import NoAnswerCode
from reference import COMMAND, FOLDER, PAGES, api_page, error_codes, written

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
WITH_A_CODE_AT = {
    ("batchyard/lines/lines.py", "_refuse"): 0,
    ("batchyard/lines/body_policy.py", "Refusal"): 0,
    ("batchyard/lines/deep_checks.py", "Refusal"): 0,
    ("batchyard/engine/prompt_counting/request_models.py", "Refusal"): 0,
    ("batchyard/engine/prompt_counting/request_models.py", "Refused"): 2,
    ("batchyard/lines/lines.py", "BatchError"): 0,
    ("batchyard/steps/fetch/input_file.py", "BatchError"): 0,
    ("batchyard/steps/collect/collect.py", "BatchError"): 0,
    ("batchyard/steps/prepare/prepare.py", "BatchError"): 0,
    ("batchyard/control/error_watch.py", "BatchError"): 0,
    ("batchyard/steps/retry/retry.py", "_refused"): 1,
    ("batchyard/files/upload.py", "_lifetime_refused"): 1,
    ("batchyard/lines/lines.py", "_refuse_file"): 0,
    ("batchyard/datasets/render.py", "_RowFailed"): 0,
    ("batchyard/datasets/render.py", "Refused"): 0,
    ("batchyard/datasets/tables.py", "Refused"): 0,
    ("batchyard/datasets/json_rows.py", "Refused"): 0,
    ("batchyard/datasets/join.py", "Refused"): 0,
    ("batchyard/datasets/process.py", "Refusal"): 0,
}
"""Calls that take a code, and as which of their arguments."""
LISTS = ("LINES", "INPUT", "WARNINGS", "BATCH", "API", "COMMANDS")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says_now(name: str) -> None:
    assert (FOLDER / name).read_text() == written(name), f"write it anew: {COMMAND}"


def test_the_folder_has_no_other_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == PAGES.keys()


def test_every_code_of_the_product_is_explained_and_no_other() -> None:
    explained = {each.code for name in LISTS for each in getattr(error_codes, name)}
    used = {
        code
        for folder in ("batchyard", "commands", "flows", "tasks")
        for path in (ROOT / folder).rglob("*.py")
        for code in codes_of(str(path.relative_to(ROOT)), ast.parse(path.read_text()))
    }
    assert explained == used


def test_every_code_of_a_line_is_among_those_of_lines() -> None:
    assert {each.value for each in NoAnswerCode} <= {each.code for each in error_codes.LINES}


def test_the_page_of_the_files_has_every_code_of_a_line_without_an_answer() -> None:
    page = (ROOT / "docs/input-format.md").read_text()
    assert [each.value for each in NoAnswerCode if f"| `{each.value}` |" not in page] == []


def test_the_guide_has_every_type_of_webhook_event() -> None:
    page = (ROOT / "docs/how-to/use-the-api.md").read_text()
    (row,) = (line for line in page.splitlines() if "webhooks.event_types.list()" in line)
    assert [each for each in EVENT_TYPES if f"`{each}`" not in row] == []


def test_no_list_explains_a_code_twice() -> None:
    for name in LISTS:
        codes = [each.code for each in getattr(error_codes, name)]
        assert len(codes) == len(set(codes)), name


def test_what_is_marked_as_ours_exists() -> None:
    page = api_page.page()
    assert page.count(" **ours**\n") == 10
    fields = {each for of_body in api_page.OUR_FIELDS.values() for each in of_body}
    marked = [line for line in page.splitlines() if line.startswith("|") and "**ours**" in line]
    assert {line.split("`")[1] for line in marked} == fields


def codes_of(path: str, tree: ast.AST) -> Iterator[str]:
    """The codes that a module gives to errors, however it does."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name="NoAnswerCode", body=members):
                yield from _texts(each.value for each in members if isinstance(each, ast.Assign))
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from _texts([value])
            case ast.AnnAssign(target=ast.Name(id="code"), value=value):
                yield from _texts([value])
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, ast.Name(id="code")])], value=ast.Tuple(elts=[_, value])
            ):
                yield from _texts([value])
            case ast.keyword(arg="code", value=value):
                yield from _texts([value])
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                yield from _texts(
                    v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "code"
                )
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments):
                place = WITH_A_CODE_AT.get((path, name), len(arguments))
                yield from _texts(arguments[place : place + 1])


def _texts(nodes: object) -> Iterator[str]:
    for node in nodes:  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
