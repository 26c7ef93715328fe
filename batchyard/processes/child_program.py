"""Python programs of ours that run as children, with pipes and hardly an environment.

What they are sent and what they answer is their callers' business, and so is what it means when
one ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, cast

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_BLOCK_BYTES: Final = 1 << 16
_INHERITED: Final = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "TZDIR")


def inherited_environment() -> dict[str, str]:
    """What a program needs of our environment; not our secrets, for some run what clients wrote."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


class ChildProgram:
    """A program that was started. Its starter calls :meth:`end`, whatever happens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # They are pipes.
        self.stdin: Final = cast("asyncio.StreamWriter", process.stdin)
        self.stdout: Final = cast("asyncio.StreamReader", process.stdout)

    @classmethod
    async def start(
        cls,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path | str | None = None,
        has_own_group: bool = False,
    ) -> Self:
        """Start Python with these arguments. Raises ``OSError``.

        ``folder`` is the program's working directory; None: ours. With a process group of its own
        it does not get the signals that stop ours.
        """
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # A traceback might quote what clients have sent.
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                process_group=0 if has_own_group else None,
            )
        )

    async def ended(self) -> int:
        """Wait until it has ended; its exit status, negative after a signal."""
        return await self._process.wait()

    async def end(self) -> int:
        """Kill it unless it has ended. It has when this returns: as :meth:`ended`."""
        if self._process.returncode is None:
            self._process.kill()
        # asyncio says that it has ended once its pipes are closed, and it does not notice that of
        # one that nobody reads: what is left in it goes nowhere. RuntimeError: another task reads.
        with suppress(RuntimeError):
            while await self.stdout.read(_BLOCK_BYTES):
                pass
        return await self._process.wait()
