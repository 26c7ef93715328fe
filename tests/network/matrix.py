"""Runs cells of the table, and compares what became of them with what the table says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from tests.network.cells import HOLDS
from tests.network.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.network.cells import Cell

_AT_ONCE = 3
"""Installations beside each other: most of a life is waiting."""


class Installed(Protocol):
    """An installation whose processes reach their servers through proxies."""

    @property
    def proxies(self) -> Mapping[str, Any]:
        """By the names that the table has for their connections."""

    async def prepare(self, connection: str) -> None:
        """Have the processes that a fault of this connection needs."""

    async def live(self, life: str, *, spare_files: int = 0) -> None:
        """A life of this kind, and every promise about it; what is broken raises.

        ``spare_files``: how many files a client may find that it did not mean to make.
        """


class Matrix:
    """Runs cells one after the other in each of a few installations; one that broke is replaced."""

    def __init__(
        self,
        install: Callable[[Path], contextlib.AbstractAsyncContextManager[Installed]],
        folder: Path,
    ) -> None:
        self._install, self._folder = install, folder
        self._installations = itertools.count()
        # They read their environment, which is that of the test's process.
        self._installing = asyncio.Lock()

    async def outcomes(self, cells: Sequence[Cell]) -> dict[str, str]:
        """What became of each cell, by its name."""
        waiting = deque(cells)
        found: dict[str, str] = {}
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_ONCE, len(cells))):
                group.create_task(self._run(waiting, found))
        return found

    async def _run(self, waiting: deque[Cell], found: dict[str, str]) -> None:
        while waiting:
            async with contextlib.AsyncExitStack() as stack:
                async with self._installing:
                    folder = self._folder / f"{self._folder.name}-{next(self._installations)}"
                    folder.mkdir()
                    installation = await stack.enter_async_context(self._install(folder))
                while waiting:
                    cell = waiting.popleft()
                    began = time.monotonic()
                    found[cell.name] = await _outcome(installation, cell)
                    seconds = time.monotonic() - began
                    print(f"{seconds:.1f} s {cell.name}: {found[cell.name]}", flush=True)  # noqa: T201
                    if found[cell.name] != HOLDS:
                        break


async def _outcome(installation: Installed, cell: Cell) -> str:
    for each in installation.proxies.values():
        each.faults = Faults()
    proxy = installation.proxies[cell.connection]
    await installation.prepare(cell.connection)
    proxy.faults = Faults([cell.fault])
    try:
        await installation.live(cell.life, spare_files=int(bool(cell.note)))
    except Exception as error:  # noqa: BLE001 - whatever is wrong, it is the cell's outcome
        return f"{type(error).__name__}: {error}"
    return HOLDS if proxy.faults.happened else "the fault did not happen"


def compare(found: Mapping[str, str], cells: Iterable[Cell]) -> None:
    """Each is as the table says. What breaks is told in words, which no test compares."""
    pinned = {cell.name: cell.outcome for cell in cells}
    assert found.keys() == pinned.keys()
    differing = {
        name: outcome
        for name, outcome in found.items()
        if (outcome == HOLDS) != (pinned[name] == HOLDS)
    }
    assert not differing, "\n\n".join(f"{name}: {what}" for name, what in differing.items())
