"""Our own programs that run as children: they answer, and end when they are told to."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from batchyard.processes.child_loop import Limits
from batchyard.processes.child_program import ChildProgram, ProgramEnded, inherited_environment
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

UNLIMITED = Limits()
ANSWERS_FOR_EVER = """
def answers(requests):
    while True:
        yield False, b"x" * 65536
"""
ECHOES = """
def answers(requests):
    for request in requests:
        print("of a library")
        yield False, request
        yield True, request[::-1]
"""
NEEDS_MEMORY = """
def answers(requests):
    for request in requests:
        yield True, b"x" * int(request)
"""


@asynccontextmanager
async def running(
    folder: Path, program: str, limits: Limits = UNLIMITED
) -> AsyncIterator[ChildProgram]:
    file = folder / "program.py"
    file.write_text(program)
    started = await ChildProgram.start(file, limits, environment=inherited_environment())
    try:
        yield started
    finally:
        await started.end()


async def test_requests_are_answered_in_parts_and_prints_are_no_answer(tmp_path: Path) -> None:
    async with running(tmp_path, ECHOES) as program:
        for request in (b"ab", b"", b"c" * 1_000_000 + b"d"):
            await program.send(request)
            assert await program.receive() == (False, request)
            assert await program.receive() == (True, request[::-1])


async def test_a_program_that_fails_has_no_answer(tmp_path: Path) -> None:
    async with running(tmp_path, NEEDS_MEMORY, Limits(data_bytes=200_000_000)) as program:
        assert await program.ask(b"3") == b"xxx"
        with pytest.raises(ProgramEnded, match="with exit status 1"):
            await program.ask(b"400000000")


async def test_a_program_whose_output_nobody_has_read_ends(tmp_path: Path) -> None:
    """More than the buffers of its pipe and of asyncio hold."""
    async with running(tmp_path, ANSWERS_FOR_EVER) as program:
        await program.receive()
        await asyncio.sleep(0.3)
        async with asyncio.timeout(PATIENCE * 2):
            assert await program.end() == -signal.SIGKILL
