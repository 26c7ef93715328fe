"""Tables for people, as wide as they need to be: what is cut off can be neither copied nor read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDTH = 10_000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A line of names, then a line for each row. What users wrote must be :func:`printable`."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, no_wrap=True)
    for row in rows:
        made.add_row(*row)
    Console(width=_WIDTH, highlight=False).print(made, crop=False)


def printable(text: str) -> Text:
    """Somebody's words: no markup, no control characters."""
    return Text("".join(each if each.isprintable() else "�" for each in text))
