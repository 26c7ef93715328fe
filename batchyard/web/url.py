"""URLs as users write them: which we accept, and what of them may be shown."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from yarl import URL

from batchyard.errors import LocationRefused
from batchyard.logs.printable import printable

_PRINTABLE_ASCII: Final = re.compile(r"[!-~]+")


def shown(url: str) -> str:
    """``scheme://host/path``, for messages and logs: no query, no user, no password."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = parts.hostname or ""
    except ValueError:
        return "(an unreadable URL)"
    host = f"[{host}]" if ":" in host else host
    return printable(f"{parts.scheme}://{host}{port}{parts.path}")


def checked_url(url: str) -> URL:
    """The URL exactly as written, because a signature covers every byte.

    Raises :class:`~batchyard.errors.LocationRefused` for a URL that cannot be used.
    """
    if not _PRINTABLE_ASCII.fullmatch(url):
        raise LocationRefused(
            f"{shown(url)} holds a space or a character that must be percent-encoded"
        )
    try:
        parsed = URL(url, encoded=True)
        host, port = parsed.host, parsed.port
    except ValueError:
        raise LocationRefused(f"{shown(url)} is not a URL: check host and port") from None
    if parsed.scheme not in {"http", "https"}:
        raise LocationRefused(f"{shown(url)} is neither http nor https")
    if not host or not port:
        raise LocationRefused(f"{shown(url)} names no host")
    if parsed.raw_user is not None or parsed.raw_password is not None:
        raise LocationRefused(
            f"{shown(url)} holds a user name or a password: use a presigned URL instead"
        )
    return parsed.with_fragment(None)
