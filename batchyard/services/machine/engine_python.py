"""Where the engines of this machine find vLLM: the Python of another environment than ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import batchyard
from batchyard.errors import SettingsError
from batchyard.settings_sources import is_file

if TYPE_CHECKING:
    from batchyard.settings import Settings

RECORD: Final = "engine.python"
"""The file in the home that has the path which `batchyard engine install` has chosen."""


def engine_python(settings: Settings) -> Path:
    """The setting, or what `batchyard engine install` has chosen, or what `make setup` has made.

    Raises :class:`~batchyard.errors.SettingsError` where it is not there, and where a folder may
    not be entered.
    """
    record = settings.home_folder / RECORD
    if settings.engine_python is not None:
        python = settings.engine_python
    elif is_file(record):
        python = Path(record.read_text().strip())
    else:
        python = Path(batchyard.__file__).parents[1] / ".venv-engine" / "bin" / "python"
    if not is_file(python):
        raise SettingsError(
            f"No engine environment at {python}: run `batchyard engine install` (in a checkout, "
            "`make setup`), or set BATCHYARD_ENGINE_PYTHON to the Python of an environment that "
            "has vLLM."
        )
    return python


def record_engine_python(home: Path, python: Path) -> None:
    """Have every process of this home use it. Raises ``OSError``."""
    draft = home / f".{RECORD}-{os.getpid()}"
    draft.write_text(f"{python}\n")
    draft.replace(home / RECORD)
