"""The keys that seal presigned URLs at rest: from the settings, or a file made at first use."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from batchyard.store.sealed import new_sealing_key

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.settings import Settings

_FILE = "secret.key"


def read_secret_keys(settings: Settings) -> list[str]:
    """All keys, the one that seals first. Losing them loses the locations, never the results."""
    if settings.secret_key is not None:
        return [key.strip() for key in settings.secret_key.get_secret_value().split(",")]
    path = settings.home_folder / _FILE
    if not path.exists():
        _make(path)
    return path.read_text().split()


def _make(path: Path) -> None:
    """The whole file at once: a key that is half there, or read too early, opens nothing."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_sealing_key() + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(name, path)
    finally:
        os.unlink(name)  # noqa: PTH108 - mkstemp gives a string
