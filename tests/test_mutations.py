"""The list of wrong changes does not rot, and the runner that tries them can tell them apart."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mutations.__main__ import main
from tests.mutations.catalogue import BadMutation, Mutation, read_mutations
from tests.mutations.trial import Tree, Verdict

if TYPE_CHECKING:
    from typing import Any

ROOT = Path(__file__).parents[1]
MUTATIONS = read_mutations()
PRODUCT = ("batchyard/", "blocks/", "tasks/", "flows/", "commands/")


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def functions_in(file: str) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, functions)}


def named(mutation: Mutation) -> str:
    return mutation.name


def test_there_are_many() -> None:
    assert len(MUTATIONS) >= 100


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_each_can_still_be_made(mutation: Mutation) -> None:
    """Its text stands in the product once, and what comes of it is still Python."""
    assert mutation.file.startswith(PRODUCT)
    ast.parse(mutation.applied_to(text_of(mutation.file)))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_each_says_what_is_wrong_and_who_notices(mutation: Mutation) -> None:
    assert mutation.breaks.endswith(".")
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert not name or name in functions_in(file)


# -- the runner ---------------------------------------------------------------------------------

PRODUCT_FILE = "def is_full(count: int, most: int) -> bool:\n    return count >= most\n"
TEST_FILE = """
from product import is_full

def test_full():
    assert is_full(3, 3)
    assert not is_full(2, 3)
"""
KNOWN: dict[str, Any] = {
    "name": "boundary",
    "breaks": "One more than the limit is taken.",
    "file": "product.py",
    "find": "count >= most",
    "put": "count > most",
    "tests": ("test_product.py",),
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    root = tmp_path / "original"
    root.mkdir()
    (root / "product.py").write_text(PRODUCT_FILE)
    (root / "test_product.py").write_text(TEST_FILE)
    files = [path.name for path in root.iterdir()]
    return Tree.copy_of(root, tmp_path / "copy", files)


def verdict(tree: Tree, limit_seconds: float = 60.0, **changes: Any) -> tuple[Verdict, str]:
    outcome = tree.judge(Mutation(**{**KNOWN, **changes}), limit_seconds)
    assert (tree.folder / "product.py").read_text() == PRODUCT_FILE
    return outcome.verdict, outcome.detail


def test_a_change_that_a_test_notices_is_killed_by_it(tree: Tree) -> None:
    assert verdict(tree) == (Verdict.KILLED, "test_product.py::test_full")


def test_a_change_that_nothing_notices_survives(tree: Tree) -> None:
    assert verdict(tree, put="most <= count") == (Verdict.SURVIVED, "")


def test_a_change_under_which_the_tests_never_end_is_ended(tree: Tree) -> None:
    endless = "all(True for _ in iter(int, 1)) or count >= most"
    assert verdict(tree, 3.0, put=endless)[0] is Verdict.TIMED_OUT


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"find": "count > most"}, "stands 0 times"),
        ({"find": "most"}, "stands 2 times"),
        ({"put": "count >= most"}, "changes nothing"),
        ({"file": "gone.py"}, "there is no gone.py"),
        ({"put": "count >= ("}, "status 2"),
        ({"tests": ("test_gone.py",)}, "status 4"),
    ],
)
def test_what_cannot_be_tried_is_no_success(
    tree: Tree, changes: dict[str, Any], reason: str
) -> None:
    """A file that cannot even be imported fails its tests, too: that notices nothing."""
    found, detail = verdict(tree, **changes)
    assert found is Verdict.BROKEN
    assert reason in detail


def test_the_tests_of_a_copy_import_the_copy(tree: Tree) -> None:
    assert tree.imports("product")
    assert not tree.imports("pytest")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    entry = '[[mutation]]\nname = "a"\nbreaks = "b."\nfile = "c"\nfind = "d"\nput = "e"\n'
    (tmp_path / "list.toml").write_text(entry * 2)
    with pytest.raises(BadMutation, match="more than one mutation is called a"):
        read_mutations(tmp_path)


def test_the_product_itself_is_tried_in_copies_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--jobs", "1", "storage-backoff-one-try-more"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 mutations noticed, 100.0 %" in printed
    assert "killed" in printed
