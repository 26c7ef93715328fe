"""docs/deploy/troubleshooting.md quotes messages that the product prints, word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.runner.window.gates import GATES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "deploy" / "troubleshooting.md"
QUOTES = re.findall(r"^> (.+)$", PAGE.read_text(), re.MULTILINE)
ANYTHING = "…"


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Every text in the product, with … in place of what is filled in."""
    return [
        text
        for folder in ("batchyard", "commands", "flows", "tasks")
        for path in (ROOT / folder).rglob("*.py")
        for text in texts_of(ast.parse(path.read_text()))
    ]


@pytest.mark.parametrize("quote", QUOTES)
def test_the_product_prints_what_the_page_quotes(quote: str, messages: list[str]) -> None:
    wanted = quote.removesuffix(ANYTHING).strip()
    assert any(wanted in message for message in messages)


def test_the_page_quotes_messages() -> None:
    assert len(QUOTES) > 20


def test_the_page_has_the_gates_in_their_order_with_their_words() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(gate.name, gate.words) for gate in GATES]


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield text_of(node)
        elif isinstance(node, ast.Call) and node.args and is_log(node.func):
            fields = (f"{keyword.arg}={ANYTHING}" for keyword in node.keywords)
            name, *rest = map(text_of, node.args)
            yield " ".join((name, *fields, *rest))


def is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "log"


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[a-z]|\{\w*\}", ANYTHING, node.value)
    return ANYTHING
