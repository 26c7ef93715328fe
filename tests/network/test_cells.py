"""Whole lives of batches while the network fails once, at each moment and in each way.

`make test-slow` runs every cell of the table, `make test-deployed` one of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING

import pytest

from tests.network.cells import HOLDS, read_cells
from tests.network.faults import Faults
from tests.network.installation import Installation, installed
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials
    from tests.network.cells import Cell

CELLS = read_cells()
LIVES = sorted({cell.life for cell in CELLS})
_AT_ONCE = 3
"""Installations beside each other: most of a life is waiting."""


class Matrix:
    """Runs cells one after the other in each of a few installations; one that broke is replaced."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        s3: S3Credentials,
        folder: Path,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self._cluster = postgres_for_session(request)
        self._s3, self._folder, self._patch = s3, folder, patch
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
                    installation = await stack.enter_async_context(self._installed())
                while waiting:
                    cell = waiting.popleft()
                    began = time.monotonic()
                    found[cell.name] = await _outcome(installation, cell)
                    seconds = time.monotonic() - began
                    print(f"{seconds:.1f} s {cell.name}: {found[cell.name]}", flush=True)  # noqa: T201
                    if found[cell.name] != HOLDS:
                        break

    def _installed(self) -> contextlib.AbstractAsyncContextManager[Installation]:
        folder = self._folder / f"{self._folder.name}-{next(self._installations)}"
        folder.mkdir()
        return installed(folder, self._cluster, self._s3, self._patch)


async def _outcome(installation: Installation, cell: Cell) -> str:
    for each in installation.proxies.values():
        each.faults = Faults()
    proxy = installation.proxies[cell.connection]
    # A runner of the other kind of engine takes the place of the one that there is.
    await installation.work(has_remote_engine=cell.connection == "engine")
    proxy.faults = Faults([cell.fault])
    try:
        await installation.live(cell.life, spare_files=int(bool(cell.note)))
    except Exception as error:  # noqa: BLE001 - whatever is wrong, it is the cell's outcome
        return f"{type(error).__name__}: {error}"
    return HOLDS if proxy.faults.happened else "the fault did not happen"


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest,
    s3: S3Credentials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Matrix:
    return Matrix(request, s3, tmp_path, monkeypatch)


def _compare(found: dict[str, str], cells: Iterable[Cell]) -> None:
    """Each is as the table says. What breaks is told in words, which no test compares."""
    pinned = {cell.name: cell.outcome for cell in cells}
    assert found.keys() == pinned.keys()
    differing = {
        name: outcome
        for name, outcome in found.items()
        if (outcome == HOLDS) != (pinned[name] == HOLDS)
    }
    assert not differing, "\n\n".join(f"{name}: {what}" for name, what in differing.items())


@pytest.mark.deployed
async def test_one_fault_of_each_kind_changes_nothing(matrix: Matrix) -> None:
    cells = [cell for cell in CELLS if cell.is_short]
    _compare(await matrix.outcomes(cells), cells)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("life", LIVES)
async def test_every_cell_is_as_the_table_says(matrix: Matrix, life: str) -> None:
    cells = [cell for cell in CELLS if cell.life == life]
    _compare(await matrix.outcomes(cells), cells)
