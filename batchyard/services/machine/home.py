"""The home: the folder of the database, objects, keys and logs of this machine."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.settings import Settings

_PROBE_BYTES = 4096


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


class HomeWatch:
    """Tells when a folder of the home can no longer be written, and when it can again.

    To be said in a terminal: all logs are in the home, so no log can say it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reason: str | None = None

    def look(self) -> str | None:
        """What has changed since the last look, for an operator; None: nothing has."""
        reason = self._why_not()
        before, self._reason = self._reason, reason
        if reason == before:
            return None
        if reason is None:
            return f"{self._folder} can be written again."
        return (
            f"{self._folder} cannot be written ({reason}): batches wait, and the logs end here, "
            "until it can. Free some space, or make its disk writable."
        )

    def _why_not(self) -> str | None:
        try:
            # More than an inode can hold, so that it takes a block of the disk.
            with tempfile.NamedTemporaryFile(dir=self._folder, buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            return error.strerror or type(error).__name__
        return None
