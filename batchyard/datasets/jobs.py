"""What the two programs of this package are asked for, and how they refuse."""

from __future__ import annotations

from typing import Final

import msgspec

ROWS_FILE: Final = "rows.parquet"
TABLE_FILE: Final = "table.parquet"
"""In the folder of the job: all that a program writes beside its lines."""


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """Rows into lines, the parts of the answer, and the rows into :data:`ROWS_FILE`."""

    files: tuple[str, ...]
    """Paths of Parquet, Arrow or JSON lines, in this order."""
    template: str
    url: str
    """The endpoint that every line names."""
    model: str | None
    """For bodies that name none; None: they stay without."""
    most_line_bytes: int
    most_rows: int
    """Behind so many and one more, nothing is read."""


class JoinJob(msgspec.Struct, frozen=True, kw_only=True):
    """The result files of a batch into :data:`TABLE_FILE`, one row for each line of its input."""

    lines: str
    output: str | None
    error: str | None
    rows: str | None
    """Paths. Without rows the table has the columns of the results only."""
    has_embeddings: bool
    merged_by: str | None = None
    """The batch, if it keeps results of earlier ones: its lines say which have run them."""


class Outcome(msgspec.Struct, frozen=True):
    """The last part of a program's answer: without a code, the job is done."""

    code: str | None = None
    message: str = ""
    error_number: int = 0
    """The operating system's: nothing is wrong with the dataset."""
