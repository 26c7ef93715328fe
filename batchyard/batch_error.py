"""Why a batch was refused or ended early, as its client sees it, and in which of its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Sequence


class BatchError(msgspec.Struct, frozen=True):
    """One entry of ``errors.data``: why the input was refused. ``line`` is 1-based and physical."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class InputPart(msgspec.Struct, frozen=True):
    """A file of which the input of a batch consists, among others."""

    file_id: str
    """For one that is no file of ours: its place, as anybody may see it."""
    lines: int = 0
    """The number of lines that the input has; 0 until it is made."""


def with_its_file(error: BatchError, parts: Sequence[InputPart]) -> BatchError:
    """The error, whose message also names the file and the line that its line comes from."""
    if error.line is None:
        return error
    line = error.line
    for part in parts:
        if line <= part.lines:
            return replace(error, message=f"{part.file_id}, line {line}: {error.message}")
        line -= part.lines
    return error


def first_error_words(errors: Sequence[BatchError] | None) -> str:
    """The first of a batch's errors, for people: ``line 3: custom_id must be a string``."""
    for error in errors or ():
        return f"line {error.line}: {error.message}" if error.line else error.message
    return "no reason was recorded"
