"""What a refusal of Prefect's server means, where Prefect's own client has made the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.web.url import shown

if TYPE_CHECKING:
    from collections.abc import Iterator


def login_refused(url: str, error: Exception) -> str | None:
    """What to do about it if the server has refused the login; None: the error says otherwise."""
    for status in _statuses(error):
        if status in {401, 403}:
            return (
                f"The Prefect server at {shown(url)} refuses the login (HTTP {status}): set "
                "PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
            )
    return None


def _statuses(error: Exception) -> Iterator[int]:
    from httpx import HTTPStatusError  # noqa: PLC0415 - a tenth of a second

    for each in (error, error.__cause__):
        if isinstance(each, HTTPStatusError):
            yield each.response.status_code
