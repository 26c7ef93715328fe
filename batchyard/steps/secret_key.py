"""The keys that seal presigned URLs at rest: from the settings, or a file made at first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from batchyard.store.sealed import new_sealing_key

if TYPE_CHECKING:
    from batchyard.settings import Settings

_FILE = "secret.key"


def read_secret_keys(settings: Settings) -> list[str]:
    """All keys, the one that seals first. Losing them loses the locations, never the results."""
    if settings.secret_key is not None:
        return [key.strip() for key in settings.secret_key.get_secret_value().split(",")]
    path = settings.home_folder / _FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().split()
    with os.fdopen(descriptor, "w") as file:
        file.write(new_sealing_key() + "\n")
    return path.read_text().split()
