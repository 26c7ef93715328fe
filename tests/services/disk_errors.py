"""A disk that fails: calls to the file system return errors in all processes of a test.

By a library that they are started with (``disk_errors.c``, LD_PRELOAD), so that everything in them
meets the errors, SQLite included.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from enum import IntFlag
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_LAYOUT = struct.Struct(f"iii{os.pathconf('/', 'PC_PATH_MAX')}s")
_COUNT = struct.Struct("i")


class Calls(IntFlag):
    """Which calls fail, as in ``disk_errors.c``."""

    WRITE = 1
    FSYNC = 2
    READ = 4
    OPEN = 8
    NAME = 16
    """Renames and links."""


class DiskErrors:
    """``environment`` is that of processes in which calls are to fail; at first none does."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        library = folder / "disk_errors.so"
        options = ["-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run([compiler, *options], check=True)
        self._file = folder / "disk_errors"
        self._file.write_bytes(bytes(_LAYOUT.size + _COUNT.size))
        self.environment = {"LD_PRELOAD": str(library), "DISK_ERRORS": str(self._file)}

    def begin(self, calls: Calls, error: int, path: str, percent: int = 100) -> None:
        """Let so many of these calls fail for files with ``path`` in their path."""
        self._put(calls, error, percent, path.encode())

    @property
    def count(self) -> int:
        """How many calls have failed."""
        return int(_COUNT.unpack_from(self._file.read_bytes(), _LAYOUT.size)[0])

    def end(self) -> None:
        """Let no call fail."""
        self._put(Calls(0), 0, 0, b"")

    def _put(self, *values: int | bytes) -> None:
        with self._file.open("r+b") as file:
            file.write(_LAYOUT.pack(*values))
