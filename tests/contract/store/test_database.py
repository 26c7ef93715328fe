"""What a caller notices of busy, absent and dying databases: patience, then one error."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from batchyard.errors import SettingsError, StoreError, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.store import open_store
from batchyard.store.turns.candidates import batches_with_free_chunks, free_chunks
from tests.contract.store.samples import MODEL, begun_batch, new_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from batchyard.store import Store

ROOT = Path(__file__).parents[3]


async def test_two_hundred_batches_created_at_once_are_all_there(database_url: str) -> None:
    # A busy machine may let one of two hundred writes wait longer than users would.
    async with open_store(database_url, patience_seconds=PATIENCE * 10) as store:
        created = await asyncio.gather(*(store.batches.create(new_batch()) for _ in range(200)))
        read = await asyncio.gather(*(store.batches.get(batch.id) for batch in created))
    assert list(read) == list(created)


async def test_processes_that_write_at_once_all_succeed(sqlite_url: str) -> None:
    """Stores share no memory here, so only SQLite's own lock is between them."""

    async def create_many() -> list[str]:
        async with open_store(sqlite_url) as store:
            return [(await store.batches.create(new_batch())).id for _ in range(25)]

    ids = await asyncio.gather(*(create_many() for _ in range(4)))
    async with open_store(sqlite_url) as store:
        for batch_id in (each for some in ids for each in some):
            await store.batches.get(batch_id)


async def test_a_write_waits_for_a_busy_sqlite(sqlite_path: Path) -> None:
    other = _lock(sqlite_path)
    async with open_store(f"sqlite:///{sqlite_path}", patience_seconds=5) as store:
        waiting = asyncio.create_task(store.batches.create(new_batch()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        other.rollback()
        other.close()
        await waiting


@pytest.mark.alone
async def test_a_sqlite_that_stays_busy_is_unavailable_after_the_patience(
    sqlite_path: Path,
) -> None:
    async with open_store(f"sqlite:///{sqlite_path}", patience_seconds=0.2) as store:
        other = _lock(sqlite_path)
        started = time.monotonic()
        # The second and third queue behind the first, and are not to wait three times as long.
        results = await asyncio.gather(
            *(store.batches.create(new_batch()) for _ in range(3)), return_exceptions=True
        )
        other.close()
        assert {type(result) for result in results} == {StoreUnavailable}
        assert time.monotonic() - started < 2
        await store.batches.create(new_batch())


async def test_readers_do_not_wait_for_a_writer(sqlite_path: Path) -> None:
    async with open_store(f"sqlite:///{sqlite_path}", patience_seconds=0.2) as store:
        batch = await store.batches.create(new_batch())
        other = _lock(sqlite_path)
        assert await store.batches.get(batch.id) == batch
        other.close()


async def test_every_sqlite_commit_is_on_the_disk(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:

        async def settings(connection):
            return [
                (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys")
            ]

        assert await store.database.read(settings) == ["wal", 2, 1]


async def test_lost_connections_are_replaced(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        batch = await store.batches.create(new_batch())
        admin = await asyncpg.connect(postgres_url)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'batchyard %' AND datname = current_database()"
        )
        await admin.close()
        assert await store.batches.get(batch.id) == batch
        await store.batches.create(new_batch())


async def test_a_row_that_stays_locked_is_unavailable(postgres_url: str) -> None:
    async with open_store(postgres_url, patience_seconds=0.3) as store:
        batch = await store.batches.create(new_batch())
        admin = await asyncpg.connect(postgres_url)
        async with admin.transaction():
            await admin.execute("SELECT 1 FROM batches FOR UPDATE")
            with pytest.raises(StoreUnavailable):
                await store.batches.set_flow_run(batch.id, "run")
        await admin.close()
        await store.batches.set_flow_run(batch.id, "run")


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    url = f"postgresql://nobody@/none?host={tmp_path}"
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        async with open_store(url, patience_seconds=0.2):
            pass


async def test_a_commit_whose_reply_is_lost_is_not_done_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have happened; only the caller can look."""
    attempts = []

    async def work(connection):
        attempts.append(connection)

        async def lose_the_reply(_):
            raise ConnectionResetError("after it was sent")

        monkeypatch.setattr(type(connection), "commit", lose_the_reply)

    with pytest.raises(StoreUnavailable):
        await store.database.write(work)
    assert len(attempts) == 1


async def test_cancelled_writers_leave_no_lock_behind(store: Store) -> None:
    for delay in range(12):
        writers = [asyncio.create_task(store.batches.create(new_batch())) for _ in range(6)]
        await asyncio.sleep(delay / 1000)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    async with asyncio.timeout(PATIENCE * 20):
        await asyncio.gather(*(store.batches.create(new_batch()) for _ in range(20)))


async def test_a_process_that_dies_while_it_begins_a_batch_leaves_nothing(
    database_url: str,
) -> None:
    async with open_store(database_url) as store:
        batch = await store.batches.create(new_batch())
        dying = """
            import asyncio, os, sys
            from batchyard.store import open_store

            class Dies(list):
                def __iter__(self):
                    os._exit(9)

            async def main(url, batch_id):
                async with open_store(url) as store:
                    await store.batches.begin(
                        batch_id, model="m", total=1, plan_key="p", chunks=Dies()
                    )

            asyncio.run(main(*sys.argv[1:]))
        """
        program = [sys.executable, "-c", textwrap.dedent(dying), database_url, batch.id]
        died = await asyncio.to_thread(subprocess.run, program, cwd=ROOT, check=False)
        assert died.returncode == 9
        assert await store.batches.get(batch.id) == batch
        assert (await begun_batch(store)).status is BatchStatus.IN_PROGRESS


async def test_the_clock_is_the_databases(store: Store) -> None:
    first, second = await store.database.now(), await store.database.now()
    assert first <= second
    assert abs(first - time.time()) < 5
    assert first != int(first) or second != int(second)


@pytest.mark.parametrize(
    "url", ["mysql://x/y", "not a url: s3cret", "sqlite://", "sqlite:///:memory:"]
)
async def test_a_url_that_cannot_be_used_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(SettingsError, match=r"sqlite:///path") as refused:
        async with open_store(url):
            pass
    assert "s3cret" not in repr(refused.value)


async def test_a_statement_that_the_database_refuses_is_a_store_error(store: Store) -> None:
    async def work(connection):
        await connection.exec_driver_sql("SELECT * FROM nowhere")

    with pytest.raises(StoreError, match="nowhere") as refused:
        await store.database.read(work)
    assert not refused.value.is_retriable


async def test_a_claim_reads_its_chunks_from_an_index(sqlite_url: str) -> None:
    """So that done chunks do not slow down the claims of a long batch."""

    async def plan(connection):
        steps = []
        for statement in (batches_with_free_chunks(MODEL, None), free_chunks("b", MODEL, 1)):
            text = str(statement.compile(connection.engine, compile_kwargs={"literal_binds": True}))
            explained = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")
            steps += [row.detail for row in explained]
        return steps

    async with open_store(sqlite_url) as store:
        steps = await store.database.read(plan)
    # One is for what is left of each batch: small ones go first.
    assert sum("ix_chunks_open" in step for step in steps) == 3
    assert any("ix_batches_status_expires_at" in step for step in steps)


def _lock(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection
