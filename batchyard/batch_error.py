"""Why a batch was refused or ended early, as its client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class BatchError(msgspec.Struct, frozen=True):
    """One entry of ``errors.data``: why the input was refused. ``line`` is 1-based and physical."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


def first_error_words(errors: Sequence[BatchError] | None) -> str:
    """The first of a batch's errors, for people: ``line 3: custom_id must be a string``."""
    for error in errors or ():
        return f"line {error.line}: {error.message}" if error.line else error.message
    return "no reason was recorded"
