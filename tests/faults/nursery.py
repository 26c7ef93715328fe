"""The test's side of the nursery: processes that are started, watched, stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Actor:
    """One process. ``parts`` are what it was made of, to make another like it."""

    role: str
    parts: dict[str, Any]
    pid: int


@dataclass(slots=True)
class Nursery:
    """Starts actors; see :mod:`tests.faults.actor`. ``ended``: exit statuses by process id."""

    process: asyncio.subprocess.Process
    ended: dict[int, int] = field(default_factory=dict)
    _started: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def start(self, role: str, parts: dict[str, Any]) -> Actor:
        await self._tell(f"{role} {json.dumps(parts)}")
        return Actor(role, parts, await self._started.get())

    async def signal(self, actor: Actor, number: signal.Signals) -> None:
        # Sent by its parent: an id that nobody has waited for yet belongs to nobody else.
        await self._tell(f"signal {actor.pid} {int(number)}")

    async def stand_still(self, actor: Actor) -> None:
        """SIGSTOP; return when none of its threads runs any more."""
        await self.signal(actor, signal.SIGSTOP)
        while not _stands_still(actor.pid):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)

    def is_alive(self, actor: Actor) -> bool:
        return actor.pid not in self.ended

    async def kill(self, actor: Actor) -> None:
        """SIGKILL; return when it is gone."""
        await self.signal(actor, signal.SIGKILL)
        await self.gone(actor)

    async def gone(self, actor: Actor) -> int:
        """Wait for its end; its exit status, negative for a signal."""
        while self.is_alive(actor):  # noqa: ASYNC110 - told by a pipe, in a test
            await asyncio.sleep(0.01)
        return self.ended[actor.pid]

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            what, pid, *status = line.decode().split()
            if what == "started":
                self.ended.pop(int(pid), None)
                self._started.put_nowait(int(pid))
            else:
                self.ended[int(pid)] = int(status[0])

    async def _tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n".encode())
        await self.process.stdin.drain()


@contextlib.asynccontextmanager
async def running_nursery(
    module: str = "tests.faults.actor", **variables: str
) -> AsyncIterator[Nursery]:
    """At the end of the block every process that it started is dead.

    ``module``: whose processes they are. ``variables`` are further ones of their environment, for
    example another version's.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, "nursery"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    nursery = Nursery(process)
    listener = asyncio.create_task(nursery.listen())
    try:
        yield nursery
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listener


def _stands_still(pid: int) -> bool:
    return all(_state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir())


def _state(thread: Path) -> str:
    """The letter of ``/proc/…/stat``, of which T is stopped; empty for one that has just ended."""
    try:
        # It follows the name, which may be anything.
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
