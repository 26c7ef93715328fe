"""``/static``: style sheets, scripts and the icon, from this package and from nowhere else.

What others wrote is in ``vendor``, with its licence, as npm has it; ``VENDORED`` has the hashes.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import Scope

PATH: Final = "/static"
VENDORED: Final = {
    "htmx-2.0.11.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of each file as the packages htmx.org and uplot have it."""


class PageFiles(StaticFiles):
    """The files, with the headers for what never changes: their URLs have their hashes."""

    def __init__(self) -> None:
        super().__init__(directory=_folder())

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file; a URL without the hash is for people, and is not kept."""
        response = await super().get_response(path, scope)
        kept = "public, max-age=31536000, immutable" if scope["query_string"] else "no-cache"
        response.headers["cache-control"] = kept
        response.headers["x-content-type-options"] = "nosniff"
        return response


@cache
def url_of(name: str) -> str:
    """The URL of a file, which changes with its content."""
    digest = hashlib.sha256((_folder() / name).read_bytes()).hexdigest()[:12]
    return f"{PATH}/{name}?{digest}"


def _folder() -> Path:
    return Path(str(files("batchyard.page") / "static"))
