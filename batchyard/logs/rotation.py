"""Log files that do not grow for ever."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 50 << 20
KEPT: Final = 3
"""How many earlier files are kept beside the current one: ``api.log.1`` is the latest."""


def rotate(path: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Begin the file anew if it has grown to ``max_bytes``; its content goes to ``PATH.1``.

    For a file that other processes have open for appending: they go on in the emptied one. What
    they write in the instant between copying and emptying is lost. Raises OSError.
    """
    if not path.exists() or path.stat().st_size < max_bytes:
        return
    for number in range(KEPT, 1, -1):
        earlier = _numbered(path, number - 1)
        if earlier.exists():
            earlier.replace(_numbered(path, number))
    copy = _numbered(path, 1)
    shutil.copyfile(path, copy)
    copy.chmod(0o600)
    os.truncate(path, 0)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
