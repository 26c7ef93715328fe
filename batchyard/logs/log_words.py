"""What a log may say about an exception."""

from __future__ import annotations

from batchyard.errors import BatchyardError


def describe(error: BaseException) -> str:
    """The message of our own errors, only the type of others: their text may quote a request."""
    return str(error) if isinstance(error, BatchyardError) else type(error).__name__
