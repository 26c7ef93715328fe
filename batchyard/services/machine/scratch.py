"""The scratch folder of a process, and those that killed processes have left.

A copy of an input may have gigabytes, so what each killed runner leaves would fill the disk in the
end. The kernel ends a process's locks with it, so a folder without a lock has no owner.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_LOCK: Final = ".lock"


class Scratch:
    """A new folder in ``parent``, until :meth:`remove`. Making it raises ``OSError``."""

    def __init__(self, parent: Path, machine: str) -> None:
        self.path = parent / f"{_prefix(machine)}{secrets.token_hex(8)}"
        self._lock_path = self.path.with_name(self.path.name + _LOCK)
        new_path = self.path.with_name(f".{self._lock_path.name}.new")
        self._lock = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # It gets its name with the lock on it, and before the folder is made: a process that
            # removes left folders must find none that it could lock.
            if _can_lock(self._lock):
                new_path.rename(self._lock_path)
            else:
                # Without a lock it must not be taken for a left one.
                new_path.unlink()
            self.path.mkdir(mode=0o700)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder with its content. Raises nothing."""
        _remove(self.path, self._lock_path)
        os.close(self._lock)


def remove_left(parent: Path, machine: str) -> None:
    """Remove the folders of processes of this machine that no longer run. Raises nothing.

    Those of other machines, which may share the parent over a network, stay: their locks may not
    be seen here.
    """
    for lock_path in sorted(parent.glob(f"{_prefix(machine)}*{_LOCK}")):
        with suppress(OSError):
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _can_lock(lock):
                    _remove(lock_path.with_name(lock_path.name.removesuffix(_LOCK)), lock_path)
            finally:
                os.close(lock)


def _prefix(machine: str) -> str:
    return f"scratch-{hashlib.sha256(machine.encode()).hexdigest()[:8]}-"


def _remove(folder: Path, lock_path: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        lock_path.unlink()


def _can_lock(descriptor: int) -> bool:
    """Lock the file. False: another process has locked it, or this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
