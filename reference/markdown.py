"""Text of the code as Markdown: docstrings, cells of tables, joined lines."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def from_docstring(text: str) -> str:
    """A docstring's reStructuredText: double backticks and roles become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.cleandoc(text))
    return text.replace("``", "`")


def one_line(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def cell(text: str) -> str:
    """The text as it can stand in a table."""
    return one_line(text).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing if it has no rows."""
    lines = [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines, ""])
