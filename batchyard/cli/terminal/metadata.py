"""``--metadata key=value`` options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_metadata(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """``["team=search"]`` to ``{"team": "search"}``; None for none.

    Raises :class:`~batchyard.errors.RequestRefused` for a pair without ``=``.
    """
    if not pairs:
        return None
    metadata = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise RequestRefused(
                f"--metadata {pair} is not of the form key=value.",
                param="metadata",
                code="invalid_value",
            )
        metadata[key] = value
    return metadata
