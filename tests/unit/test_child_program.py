"""Our own programs that run as children: they end when they are told to, whatever they print."""

from __future__ import annotations

import asyncio
import signal

from batchyard.processes.child_program import ChildProgram, inherited_environment
from tests.patience import PATIENCE

PRINTS_FOR_EVER = "import sys\nwhile True: sys.stdout.buffer.write(b'x' * 65536)"


async def test_a_program_whose_output_nobody_has_read_ends() -> None:
    """More than the buffers of its pipe and of asyncio hold."""
    program = await ChildProgram.start("-c", PRINTS_FOR_EVER, environment=inherited_environment())
    await program.stdout.read(1)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(PATIENCE * 2):
        assert await program.end() == -signal.SIGKILL
