"""What is said of a home that can no longer be written, and when."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

from batchyard.services.machine.home import HomeWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may have a byte, which is what a full disk allows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_can_be_written_is_not_spoken_of_and_nothing_is_left_in_it(
    tmp_path: Path,
) -> None:
    watch = HomeWatch(tmp_path)
    assert [watch.look(), watch.look()] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    """Where there is room for the name of a file, but not for what is in it."""
    watch = HomeWatch(tmp_path)
    with no_room():
        said = [watch.look(), watch.look()]
    assert said[0] is not None
    assert said[0].startswith(f"{tmp_path} cannot be written (File too large): batches wait")
    assert said[1] is None
    assert watch.look() == f"{tmp_path} can be written again."
    assert watch.look() is None


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    said = HomeWatch(tmp_path / "gone").look()
    assert said is not None
    assert "No such file or directory" in said
