"""Python programs of ours that run as children, with limits and hardly an environment.

A program answers requests (:mod:`batchyard.processes.child_loop` is its side). What they ask is
their callers' business, and so is what it means when a program ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple, Self, cast

from batchyard.processes import child_loop
from batchyard.processes.child_loop import HEAD, Limits, frame

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_BLOCK_BYTES: Final = 1 << 16
_END_SECONDS: Final = 5.0
"""For a process that has closed its standard output."""
_UNLIMITED: Final = Limits()
_INHERITED: Final = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "TZDIR")


def inherited_environment() -> dict[str, str]:
    """What a program needs of our environment; not our secrets, for some run what clients wrote."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


class Part(NamedTuple):
    """A part of an answer."""

    is_last: bool
    data: bytes


class ProgramEnded(Exception):
    """The program has ended without an answer. ``code``: exit status, negative after a signal."""

    def __init__(self, code: int) -> None:
        self.code = code
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        super().__init__(how)


class ChildProgram:
    """A program that was started. Its starter calls :meth:`end`, whatever happens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # They are pipes.
        self._stdin: Final = cast("asyncio.StreamWriter", process.stdin)
        self._stdout: Final = cast("asyncio.StreamReader", process.stdout)
        # What is sent has left us then, also if our loop stands still afterwards.
        self._stdin.transport.set_write_buffer_limits(0)

    @classmethod
    async def start(
        cls,
        file: Path | str,
        limits: Limits = _UNLIMITED,
        *,
        environment: Mapping[str, str],
        python: Path | None = None,
        options: Sequence[str] = ("-P",),
        folder: Path | str | None = None,
    ) -> Self:
        """Start a Python with the program in ``file``. Raises ``OSError``.

        ``python``: None for ours, which gets the ``options``. ``folder`` is the program's working
        directory; None: ours.
        """
        words = (*options, child_loop.__file__, str(file), json.dumps(asdict(limits)))
        return cls(
            await asyncio.create_subprocess_exec(
                *(python or sys.executable, *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # A traceback might quote what clients have sent.
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                # What stops our process group leaves it the time to answer.
                process_group=0,
            )
        )

    async def send(self, request: bytes) -> None:
        """Send the next request. Raises :class:`ProgramEnded`."""
        try:
            self._stdin.write(frame(request))
            await self._stdin.drain()
        except ConnectionError:
            raise ProgramEnded(await self._ended()) from None

    async def receive(self) -> Part:
        """The next part of an answer. Raises :class:`ProgramEnded`."""
        try:
            is_last, length = HEAD.unpack(await self._stdout.readexactly(HEAD.size))
            return Part(is_last, await self._stdout.readexactly(length))
        except asyncio.IncompleteReadError:
            raise ProgramEnded(await self._ended()) from None

    async def ask(self, request: bytes) -> bytes:
        """The answer to a request, of one part. Raises :class:`ProgramEnded`."""
        await self.send(request)
        return (await self.receive()).data

    async def _ended(self) -> int:
        with suppress(TimeoutError):
            # To kill one that is about to end would lose how it has ended.
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        return await self.end()

    async def end(self) -> int:
        """Kill it unless it has ended; its exit status, negative after a signal."""
        if self._process.returncode is None:
            self._process.kill()
        # asyncio says that it has ended once its pipes are closed, and it does not notice that of
        # one that nobody reads: what is left in it goes nowhere. RuntimeError: another task reads.
        with suppress(RuntimeError):
            while await self._stdout.read(_BLOCK_BYTES):
                pass
        return await self._process.wait()
