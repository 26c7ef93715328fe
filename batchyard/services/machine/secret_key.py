"""The keys that seal secrets at rest: from the settings, or files that are made at first use.

::

    secret.key        the key that seals, and behind it those that only open
    secret.next.key   while keys are rotated: the next one to seal, which opens already

Processes read them once, as they start. So a key is known to all of them before it seals, and
none of them seals with an older one when that is dropped: :class:`Rotation` goes in three steps,
with a restart of everything after the first and the second.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.storage.file import sync_folder
from batchyard.store import RunnerKind, new_sealing_key, reseal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.settings import Settings
    from batchyard.store import Resealed, RunnerRecord, Store

_FILE: Final = "secret.key"
_NEXT_FILE: Final = "secret.next.key"
_START_SECONDS: Final = 5.0
"""How long before it registers as a runner a process may have read the keys."""


def read_secret_keys(settings: Settings) -> list[str]:
    """All keys, the one that seals first. Losing them loses what is sealed, never the results."""
    if settings.secret_key is not None:
        return [key.strip() for key in settings.secret_key.get_secret_value().split(",")]
    path = key_file(settings)
    if not path.exists():
        _make(path, [new_sealing_key()])
    # First the next one: it moves from its file to the other one, never back.
    coming = _read(settings.home_folder / _NEXT_FILE)
    return list(dict.fromkeys([*_read(path), *coming]))


def key_file(settings: Settings) -> Path:
    """Where the keys are that the settings do not name."""
    return settings.home_folder / _FILE


class RotationStep(Enum):
    """What a rotation does next."""

    ANNOUNCE = "announce"
    """Make a new key, which opens and does not seal."""
    SEAL = "seal"
    """Seal with it, and seal again what is there."""
    DROP = "drop"
    """Seal anew what was sealed with older keys meanwhile, and drop these."""


class Rotation:
    """A rotation of the key file, as far as it is. Where the settings name keys, there is none.

    Every step may be repeated, also after a crash in the middle of it.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = key_file(settings)
        self._next_path = settings.home_folder / _NEXT_FILE

    @property
    def step(self) -> RotationStep:
        """The step that is to be made next, from what the key files hold."""
        if _read(self._next_path):
            return RotationStep.SEAL
        return RotationStep.DROP if len(_read(self._path)) > 1 else RotationStep.ANNOUNCE

    async def not_restarted(self, store: Store, *, within_seconds: float) -> list[RunnerRecord]:
        """Live runners that have not read the keys since the last step: the next has to wait.

        Other processes, such as the API's, are not known.
        """
        changed = {RotationStep.SEAL: self._next_path, RotationStep.DROP: self._path}.get(self.step)
        if changed is None:
            return []
        changed_at = changed.stat().st_mtime
        runners = [
            runner
            for kind in RunnerKind
            for runner in await store.runners.live(kind=kind, within_seconds=within_seconds)
        ]
        return [each for each in runners if each.started_at < changed_at + _START_SECONDS]

    def announce(self, now: float) -> None:
        """Make the new key. ``now``, here and below, by the database's clock."""
        _make(self._next_path, [new_sealing_key()], now)

    def begin_to_seal(self, now: float) -> None:
        """Put the new key first: processes that read the keys from now on seal with it."""
        _replace(self._path, [*_read(self._next_path), *_read(self._path)], now)

    async def encrypt_again(self, store: Store) -> Resealed:
        """Seal everything with the first key. ``store`` was opened after that."""
        resealed = await reseal(store.database)
        # Only now: until then a repetition of this step must find it.
        self._next_path.unlink(missing_ok=True)
        return resealed

    async def drop_older(self, store: Store, now: float) -> Resealed:
        """Drop all keys but the first, after what is sealed was sealed again."""
        resealed = await reseal(store.database)
        _replace(self._path, _read(self._path)[:1], now)
        return resealed


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def _make(path: Path, keys: Sequence[str], now: float | None = None) -> None:
    """Write the file, unless it is there."""
    draft = _draft(path, keys, now)
    try:
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        draft.unlink()
    # What is sealed with it must not outlive it in a power cut.
    sync_folder(path.parent)


def _replace(path: Path, keys: Sequence[str], now: float) -> None:
    draft = _draft(path, list(dict.fromkeys(keys)), now)
    draft.replace(path)
    # As above, of what is sealed next.
    sync_folder(path.parent)


def _draft(path: Path, keys: Sequence[str], now: float | None) -> Path:
    """Write the whole file at once: part of a key opens nothing."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join([*keys, ""]))
        file.flush()
        os.fsync(descriptor)
    if now is not None:
        os.utime(name, (now, now))
    return Path(name)
