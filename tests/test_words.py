"""What is written beside the code says what a thing is, also if it is short.

A docstring, or a string beneath a constant or a field, of fewer than eight words begins with a noun
or a verb: "The tokens of each class.", not "By class."
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("batchyard", "flows", "tasks", "blocks", "commands")
SHORT_WORDS: Final = 8
NO_BEGINNINGS: Final = """
about after as at before behind between beyond by could for from if in it its less likewise never
not of on once only since these they this those to under until whose with within without yes
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_short_docstring_begins_with_a_noun_or_a_verb(folder: str) -> None:
    clipped = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in _strings(path)
        if _is_clipped(text)
    ]
    assert clipped == []


@pytest.mark.parametrize(
    ("text", "is_clipped"),
    [
        ("By class.", True),
        ("Of its work.", True),
        ("Once, until it changes.", True),
        ("The tokens of each class.", False),
        ("None: it is kept.", False),
        ("In: claimed. Out: done.", False),
        ("In one sentence: what a long docstring says.", False),
    ],
)
def test_what_counts_as_clipped(text: str, is_clipped: bool) -> None:
    assert _is_clipped(text) is is_clipped


def _is_clipped(text: str) -> bool:
    words = text.split()
    return len(words) < SHORT_WORDS and words[0].rstrip(".,").lower() in NO_BEGINNINGS.split()


_WITH_STRINGS: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file that are statements of their own, and their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, _WITH_STRINGS):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    yield statement.lineno, text
