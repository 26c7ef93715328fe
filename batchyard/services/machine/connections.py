"""Which database, object store and Prefect this process uses: in words, without secrets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from batchyard.settings_sources import config_file
from batchyard.web.url import shown

if TYPE_CHECKING:
    from batchyard.settings import Settings


def connections(settings: Settings) -> dict[str, str]:
    """What each process says when it starts; passwords and queries of URLs are left out."""
    prefect = os.environ.get("PREFECT_API_URL")
    return {
        "Database": _database(settings.database),
        "Storage": settings.storage or str(settings.home_folder / "objects"),
        "Prefect": shown(prefect) if prefect else "none: PREFECT_API_URL is not set",
        "Settings": str(config_file() or "environment variables only"),
    }


def connections_line(settings: Settings) -> str:
    """The same for a log, in one line."""
    words = (f"{name.lower()}={value!r}" for name, value in connections(settings).items())
    return " ".join(words)


def _database(url: str) -> str:
    try:
        return make_url(url).set(query={}).render_as_string(hide_password=True)
    except ArgumentError:
        return "a URL that cannot be read"
