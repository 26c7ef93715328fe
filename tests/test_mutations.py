"""The list of wrong changes does not rot, and the runner that tries them can tell them apart."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.mutations.__main__ import main
from tests.mutations.catalogue import BadMutation, Mutation, read_mutations
from tests.mutations.of_a_diff import is_only_of_a_text, which_tests
from tests.mutations.trial import Tree, Verdict

if TYPE_CHECKING:
    from typing import Any

ROOT = Path(__file__).parents[1]


def test_each_can_be_made_and_names_tests_that_exist() -> None:
    assert [fault for mutation in read_mutations() for fault in faults_of(mutation)] == []


def faults_of(mutation: Mutation) -> list[str]:
    faults = [f"there is no test {test}" for test in mutation.tests if not exists(test)]
    if not (mutation.tests and mutation.breaks.endswith(".")):
        faults.append(f"{mutation.place}: what breaks, in a sentence, and which test notices it?")
    try:
        ast.parse(mutation.applied_to(mutation.file_in(ROOT).read_text()))
    except BadMutation as error:
        faults.append(str(error))
    return faults


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and (not name or name in functions_in(file))


@cache
def functions_in(file: str) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


# -- where a mutation is made -------------------------------------------------------------------

KNOWN: dict[str, Any] = {
    "theme": "limits",
    "place": "product:is_full",
    "replace": "count >= most",
    "put": "count > most",
    "breaks": "One more than the limit is taken.",
    "tests": ("test_product.py",),
}
LAID_OUT_OTHERWISE = """
LIMIT = 3

class Pool:
    if LIMIT:
        def take(self):
            self.look()  # first
            return (
                self.count  # those that are there
                >= self.most
            )
"""


def made(source: str, **changes: Any) -> str:
    return Mutation(**{**KNOWN, **changes}).applied_to(source)


@pytest.mark.parametrize(
    ("place", "replace", "put", "expected"),
    [
        ("product:Pool.take", "self.count >= self.most", "True", "return True"),
        ("product:Pool.take", "self.look()", "", "def take(self):\n            return"),
        ("product:Pool.take", "self.look()", "await self.look()", "await self.look()\n"),
        ("product:Pool", "self.look()", "if self.most:\n    self.look()", "if self.most:\n"),
        ("product:LIMIT", "3", "4", "LIMIT = 4"),
    ],
)
def test_layout_and_comments_do_not_matter(
    place: str, replace: str, put: str, expected: str
) -> None:
    assert expected in made(LAID_OUT_OTHERWISE, place=place, replace=replace, put=put)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replace": "count <= most"}, "occurs 0 times"),
        ({"replace": "self"}, "occurs 3 times"),
        ({"put": "(self.count  >= self.most)"}, "is replaced with itself"),
        ({"place": "product:Pool.give"}, "nothing has that name"),
    ],
)
def test_what_cannot_be_made_says_why(changes: dict[str, Any], reason: str) -> None:
    usual = {"place": "product:Pool.take", "replace": "self.count >= self.most"}
    with pytest.raises(BadMutation, match=reason):
        made(LAID_OUT_OTHERWISE, **{**usual, **changes})


# -- the runner ---------------------------------------------------------------------------------

PRODUCT_FILE = "def is_full(count: int, most: int) -> bool:\n    return count >= most\n"
TEST_FILE = """
from product import is_full

def test_full():
    assert is_full(3, 3)
    assert not is_full(2, 3)
"""


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
        ({"place": "gone:is_full"}, "no such module"),
        ({"replace": "def is_full(): pass"}, "occurs 0 times"),
        ({"tests": ("test_gone.py",)}, "status 4"),
    ],
)
def test_what_cannot_be_tried_is_no_success(
    tree: Tree, changes: dict[str, Any], reason: str
) -> None:
    found, detail = verdict(tree, **changes)
    assert found is Verdict.BROKEN
    assert reason in detail


def test_the_tests_of_a_copy_import_the_copy(tree: Tree) -> None:
    assert tree.imports("product")
    assert not tree.imports("pytest")


def test_the_product_itself_is_tried_in_copies_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--jobs", "1", "batchyard.storage.file:write_file"]) == 0
    printed = capsys.readouterr().out
    assert "mutations noticed, 100.0 %" in printed
    assert "killed" in printed


# -- what mutmut is given -----------------------------------------------------------------------


def test_the_tests_of_a_file_import_its_module_or_are_named_for_it() -> None:
    chosen = which_tests(["batchyard/batch/error_threshold.py", "batchyard/store/leases.py"])
    assert "tests/unit/test_error_threshold.py" in chosen
    assert "tests/contract/store/test_leases.py" in chosen
    assert "tests/unit/test_address.py" not in chosen


def test_another_text_is_told_from_another_behaviour() -> None:
    assert is_only_of_a_text('--- a\n+++ b\n-    log("Done.")\n+    log("XXDone.XX")\n')
    assert is_only_of_a_text('--- a\n+++ b\n-    log("Done.")\n+    log("DONE.")\n')
    assert not is_only_of_a_text("--- a\n+++ b\n-    a >= b\n+    a > b\n")
