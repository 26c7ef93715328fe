"""What the two programs of this package are asked for, and how they refuse."""

from __future__ import annotations

from typing import Final

import msgspec

ROWS_FILE: Final = "rows.parquet"
TABLE_FILE: Final = "table.parquet"
REFUSAL_FILE: Final = "refusal.json"
"""In the folder of the job: all that a program writes beside its lines."""
SYSTEM_ERROR: Final = 100
"""A program's exit status less this is the ``errno`` of the operating system: nothing is wrong
with the dataset."""


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a program may use beyond the limits that every one has; None: no limit."""

    cpu_seconds: int | None = None
    file_bytes: int | None = None


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """Rows into lines on standard output, and the rows into :data:`ROWS_FILE`."""

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
    limits: ProcessLimits = ProcessLimits()


class JoinJob(msgspec.Struct, frozen=True, kw_only=True):
    """The result files of a batch into :data:`TABLE_FILE`, one row for each line of its input."""

    lines: str
    output: str | None
    error: str | None
    rows: str | None
    """Paths. Without rows the table has the columns of the results only."""
    has_embeddings: bool
    limits: ProcessLimits = ProcessLimits()


class Refusal(msgspec.Struct, frozen=True):
    """Why a program ended without its result, in :data:`REFUSAL_FILE`."""

    code: str
    message: str
