"""A database that is away for longer than leases last, without the time that this takes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from batchyard.errors import StoreUnavailable
from batchyard.services.leases import renewal
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from tests.steps.conftest import Yard

_WAIT_SECONDS = 20.0


class Outage:
    """Of the database of a yard, and of the clocks by which its processes renew their leases."""

    def __init__(self, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
        self._database = yard.services.store.database
        self._read, self._write = self._database.read, self._database.write
        self._seconds = 0.0
        self._is_away = False
        self._refused = self._answered = 0
        clocks = renewal.clocks

        def later() -> tuple[float, float]:
            monotonic, wall = clocks()
            return monotonic + self._seconds, wall + self._seconds

        async def read(work: Any) -> Any:
            await self._ask()
            return await self._read(work)

        async def write(work: Any) -> Any:
            await self._ask()
            return await self._write(work)

        monkeypatch.setattr(renewal, "clocks", later)
        monkeypatch.setattr(self._database, "read", read)
        monkeypatch.setattr(self._database, "write", write)

    @contextlib.asynccontextmanager
    async def away(self, table: str, seconds: float) -> AsyncIterator[None]:
        """Every call fails while the block runs. It takes so long, and leases of ``table`` end."""

        async def work(connection: Any) -> None:
            await connection.exec_driver_sql(
                f"UPDATE {table} SET lease_expires_at = 1 WHERE lease_expires_at IS NOT NULL"  # noqa: S608
            )

        self._is_away = True
        try:
            await self._write(work)
            self.pass_by(seconds)
            yield
        finally:
            self._is_away = False

    def pass_by(self, seconds: float) -> None:
        """Set the clocks forward."""
        self._seconds += seconds

    async def refuses(self, calls: int) -> None:
        """Return when so many more calls have failed."""
        await self._until(lambda: self._refused, calls)

    async def answers(self, calls: int) -> None:
        """Return when so many more calls were let through."""
        await self._until(lambda: self._answered, calls)

    async def _until(self, count: Callable[[], int], calls: int) -> None:
        most = count() + calls
        async with asyncio.timeout(PATIENCE * _WAIT_SECONDS):
            while count() < most:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.005)

    async def _ask(self) -> None:
        if self._is_away:
            self._refused += 1
            raise StoreUnavailable("The database is away.")
        self._answered += 1
