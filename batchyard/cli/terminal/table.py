"""Tables for people, as wide as they need to be: what is cut off can be neither copied nor read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchyard.logs.printable import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_WIDTH = 10_000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A line of names, then a line for each row."""
    write_table(make_table(columns, rows))


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Collection[str] = ()
) -> Table:
    """``right``: the columns of numbers. What users wrote must be :func:`user_text`."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def write_table(made: Table) -> None:
    """Print the table to standard output, without cutting off long lines."""
    Console(width=_WIDTH, highlight=False).print(made, crop=False)


def user_text(text: str) -> Text:
    """The user's text without markup and control characters."""
    return Text(printable(text))
