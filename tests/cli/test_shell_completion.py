"""Completion in a shell, as the shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("batchyard doc", ["doctor"]), ("batchyard engine ins", ["install"])],
)
def test_bash_gets_the_commands_that_begin_so(typed: str, completed: list[str]) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).with_name("batchyard")],
        env=os.environ | asked | {"_BATCHYARD_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == completed
