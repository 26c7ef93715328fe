"""The home: the folder of the database, objects, keys and logs of this machine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.settings import Settings


@contextmanager
def in_home(settings: Settings) -> Iterator[Path]:
    """The home, made if it does not exist, for a block that reads and writes there.

    Raises :class:`~batchyard.errors.SettingsError` for each ``OSError``, those of the block
    included: the operator has to name another folder, or to free space.
    """
    home = settings.home_folder
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield home
    except OSError as error:
        raise SettingsError(
            f"BATCHYARD_HOME, {home}, cannot be used ({error.strerror}): "
            "name a folder that you may write to and that has room."
        ) from error
