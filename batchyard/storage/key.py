"""The names of stored objects: what a key may look like."""

from __future__ import annotations

import re

from batchyard.errors import LocationRefused

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_.=@+-]{0,199}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,15}}")


def checked_key(key: str) -> str:
    """Return ``key`` when it is slash-separated plain segments such as ``files/file-abc``.

    A segment never begins with a dot, so no key leaves the root, and a half-written file,
    whose name does begin with one, is never taken for an object. Ids are ours; this is the
    second lock on the door. Raises :class:`~batchyard.errors.LocationRefused`.
    """
    if not _KEY.fullmatch(key):
        raise LocationRefused(
            f"{key!r} is not a storage key: use letters, digits and _ . = @ + - between slashes"
        )
    return key
