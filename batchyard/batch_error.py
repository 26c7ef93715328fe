"""Why a batch was refused or ended early, as its client sees it."""

from __future__ import annotations

import msgspec


class BatchError(msgspec.Struct, frozen=True):
    """One entry of ``errors.data``: why the input was refused. ``line`` is 1-based and physical."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
