"""Output that a file has no room for, or whose reader is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from batchyard.cli.terminal.say import unbroken


def _open_as(stream: IO[str]) -> Path:
    return Path(f"/proc/self/fd/{stream.fileno()}").readlink()


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path: Path) -> None:
    there_is_room = tmp_path / "output"
    with Path("/dev/full").open("w") as stream, there_is_room.open("w") as file:
        output = unbroken(stream)
        output.write("before\n")
        output.flush()
        assert _open_as(stream) == Path("/dev/full")
        os.dup2(file.fileno(), stream.fileno())
        output.write("after\n")
        output.flush()
    assert there_is_room.read_text() == "before\nafter\n"


def test_nothing_is_written_once_the_reader_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        output = unbroken(stream)
        output.write("before\n")
        output.flush()
        assert _open_as(stream) == Path(os.devnull)
        output.write("after\n")
        output.flush()
