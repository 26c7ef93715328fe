"""The bad lines of a batch that runs without them: each is answered with what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from batchyard.batch_error import with_its_file
from batchyard.results.results import refused
from batchyard.services.segments.answered_lines import AnsweredLines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchyard.batch_error import BatchError, InputPart
    from batchyard.lines.lines import BadLine

_MOST_MESSAGES: Final = 3
"""The most messages of one line."""


class RefusedLines(AnsweredLines):
    """The error lines of bad lines, in a file in ``folder`` until they are stored.

    They are written before the batch begins, as other rules may have left others out.
    """

    def __init__(self, batch_id: str, parts: Sequence[InputPart], folder: Path) -> None:
        super().__init__(folder, "refused")
        self._batch_id = batch_id
        self._parts = parts

    def refuse(self, line: BadLine) -> None:
        """Take the next bad line."""
        error, message = line.errors[0], self._message(line.errors)
        result = refused(self._batch_id, line.ordinal, line.custom_id, error.code, message)
        self.add(line.ordinal, result)

    def _message(self, errors: tuple[BatchError, ...]) -> str:
        # Once for the line, which may have several.
        words = " ".join(error.message for error in errors[:_MOST_MESSAGES])
        first = errors[0]
        if self._parts:
            return with_its_file(replace(first, message=words), self._parts).message
        return f"Line {first.line}: {words}"
