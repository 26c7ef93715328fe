"""A year of an installation: nothing grows without end that is not meant to.

    pytest -n 0 -s -m slow tests/year/test_year.py

shows what is there after a day, a month, a quarter, half a year and a year.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.services.postgres import postgres_for_session
from tests.services.receiver import running_receiver
from tests.year.census import TABLES, table
from tests.year.installation import begun_with_0_2_0

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.year.census import Census

GROWS: Final = {
    "api_keys": "with the keys that are made; a revoked one is shown",
    "audit_log": "with what operators do",
    "batch_points": "with batches that run for long, 200 for each at most",
    "batch_receivers": "with batches that name a receiver",
    "batches": "with batches",
    "chain_parts": "with batches that have stages",
    "chains": "with batches that have stages",
    "chunks": "with batches, a row for every 50 to 8,192 of their lines",
    "tenants": "with tenants",
    "cache_salts": "with tenants",
    "usage": "with batches, a row for each of their models",
}
"""What is kept for ever, on purpose."""
BOUNDED: Final = {
    "batch_roots": "batches that have not ended",
    "completions": "batches whose files are kept",
    "deliveries": "30 days after their end",
    "delivery_attempts": "30 days after the end of their delivery",
    "engine_hours": "models",
    "files": "30 days after their deletion",
    "idempotency": "two days; a year for files of a watched folder",
    "leases": "a week after their end",
    "lengths": "30 days without an answer, and 1,000 for each tenant",
    "live_engines": "runners",
    "rates": "models and pools",
    "responses": "30 days after their end",
    "runners": "a week after their end",
    "sealing_proof": "one",
    "sessions": "half a day",
    "status_changes": "a day",
    "storage_mark": "one",
    "table_version": "one",
    "upload_parts": "uploads that have not ended",
    "uploads": "30 days after their hour",
    "webhook_endpoints": "those that are not deleted",
}
"""What ends, and when."""
LOOKS: Final = (1, 30, 90, 180, 365)
_MEMORY_BYTES: Final = 16 * 2**20
"""So much more may a process have after three further quarters."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a file system: it is not durability that is tried here."""
    memory = Path("/dev/shm")  # noqa: S108 - a file system, and a folder of our own in it
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="year-") as found:
        yield Path(found)


def grown(
    before: Census, after: Census, *, ratio: float, rows: int, memory_bytes: int
) -> dict[str, tuple[int, int]]:
    """What is not meant to grow, and has, with both figures."""
    values = [
        (name, before.rows[name], after.rows[name], rows) for name in TABLES if name in BOUNDED
    ]
    values += [(name, before.files[name], after.files[name], rows) for name in before.files]
    found = {name: (one, other) for name, one, other, more in values if other > one * ratio + more}
    return found | {
        name: (before.memory[name], after.memory[name])
        for name in before.memory
        if after.memory[name] > before.memory[name] + memory_bytes
    }


def test_each_table_says_whether_it_grows_for_ever() -> None:
    assert sorted([*GROWS, *BOUNDED]) == TABLES


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def test_what_is_not_kept_for_ever_is_gone_after_two_months(
    request: pytest.FixtureRequest, folder: Path, database: str
) -> None:
    """A few days, each ten after the one before, with a little of everything on each of them."""
    url = None
    if database == "postgres":
        cluster = postgres_for_session(request)
        url = cluster.url(await cluster.create_database())
    with running_receiver(tls=False) as receiver:
        async with begun_with_0_2_0(folder, url) as installation:
            # It answers: a delivery that fails would be tried on ten of these days.
            installation.days.receiver = receiver.url("/hook")
            installation.days.all_within_days = 4
            await installation.live(12, (8, 12), apart=10)
    before, after = installation.found[8], installation.found[12]
    found = grown(before, after, ratio=1.25, rows=1, memory_bytes=_MEMORY_BYTES)
    assert found == {}, table([before, after])
    assert receiver.requests


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(7200)
async def test_after_a_year_there_is_as_much_as_after_a_quarter(folder: Path) -> None:
    """But for what is kept for ever."""
    async with begun_with_0_2_0(folder) as installation:
        await installation.live(LOOKS[-1], LOOKS)
    found = list(installation.found.values())
    print(f"\n{table(found)}")  # noqa: T201 - it is the result
    before, after = installation.found[90], installation.found[365]
    assert grown(before, after, ratio=1.25, rows=20, memory_bytes=_MEMORY_BYTES) == {}
