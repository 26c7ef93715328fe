"""docs/deploy/troubleshooting.md quotes messages that the product prints, word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else ANYTHING for part in node.values
            )
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[a-z]|\{\w*\}", ANYTHING, node.value)
