"""The file of the key that seals secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.services.machine.secret_key import key_file, read_secret_keys
from batchyard.settings import read_settings

if TYPE_CHECKING:
    import pytest


def test_the_name_of_a_new_key_is_durable_before_anything_is_sealed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database on another machine would keep what a power cut has taken the key of."""
    settings = read_settings(home=tmp_path)
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, key_file(settings).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    read_secret_keys(settings)
    assert [is_named for _, is_named in synced] == [False, True]
    assert synced[1][0] == tmp_path
