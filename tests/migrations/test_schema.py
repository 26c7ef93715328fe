"""The migrations make the tables that the models describe, from nothing, once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from cryptography.fernet import Fernet
from sqlalchemy import inspect, text

from batchyard.database.columns import Row
from batchyard.database.database import Database
from batchyard.database.migrate import migrations_config
from batchyard.errors import StoreError
from batchyard.store import BatchLocations, DeliveryKind, new_sealing_key, open_store
from batchyard.store.schema import _our_revisions
from tests.contract.store.samples import new_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection


async def test_an_empty_database_becomes_usable(empty_url: str) -> None:
    async with open_store(empty_url, migrate=True) as store:
        batch = await store.batches.create(new_batch())
    async with open_store(empty_url, migrate=True) as store:
        assert await store.batches.get(batch.id) == batch


async def test_the_migrations_equal_the_models(empty_url: str) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        return compare_metadata(context, Row.metadata)

    assert await _migrated_and(empty_url, differences) == []


async def test_partial_indexes_and_names_equal_the_models(empty_url: str) -> None:
    """What Alembic does not compare."""

    def shape(connection: Connection) -> dict[str, object]:
        found = inspect(connection)
        return {
            table: (
                sorted(_index(index) for index in found.get_indexes(table)),
                found.get_pk_constraint(table)["name"],
                [key["name"] for key in found.get_foreign_keys(table)],
                [key["options"].get("ondelete") for key in found.get_foreign_keys(table)],
            )
            for table in Row.metadata.tables
        }

    def models(connection: Connection) -> dict[str, object]:
        Row.metadata.drop_all(connection)
        Row.metadata.create_all(connection)
        return shape(connection)

    assert await _migrated_and(empty_url, shape) == await _migrated_and(empty_url, models)


async def test_tenants_keep_what_they_had_before_they_could_be_told(empty_url: str) -> None:
    await _migrated_to(empty_url, "0003", "INSERT INTO tenants (name, served_at) VALUES ('t', 5)")
    async with open_store(empty_url, migrate=True) as store:
        assert await store.tenants.notify_email("t") is None
        await store.tenants.set_notify_email("t", "ada@example.org")
        served = text("SELECT name, served_at, notify_email FROM tenants")

        async def rows(connection: AsyncConnection) -> list[object]:
            return [tuple(row) for row in await connection.execute(served)]

        assert await store.database.read(rows) == [("t", 5, "ada@example.org")]


_BATCH = (
    "INSERT INTO batches (id, tenant, status, endpoint, input_file_id, completion_window, "
    "created_at, expires_at, total, completed, failed, options, priority, epoch, "
    "token_estimate, input_tokens, cached_tokens, output_tokens, reasoning_tokens, "
    "total_tokens) VALUES ('b', 't', 'completed', 'e', 'f', '24h', 1, 2, 3, 3, 0, "
    "'{\"mixed_models\": true}', 0, 0, 0, 0, 0, 0, 0, 0)"
)


async def test_batches_of_before_share_no_answers(empty_url: str) -> None:
    await _migrated_to(empty_url, "0004", _BATCH)
    async with open_store(empty_url, migrate=True) as store:
        found = await store.batches.get("b")
    assert (found.options.mixed_models, found.options.deduplicate) == (True, False)
    assert found.deduplicated_requests == 0


async def test_what_was_measured_of_options_is_dropped(empty_url: str) -> None:
    row = (
        "INSERT INTO tunings (model, device, version, options, shape, planned, gains, is_done, "
        "updated_at) VALUES ('m', 'H100', '0.32.0', 'a', 's', 'p', '{}', true, 1)"
    )
    await _migrated_to(empty_url, "0034", row)
    async with open_store(empty_url, migrate=True) as store:

        def tables(connection: Connection) -> list[str]:
            return inspect(connection).get_table_names()

        found = await store.database.read(lambda connection: connection.run_sync(tables))
    assert "tunings" not in found
    assert "batches" in found


async def test_hidden_batches_and_files_of_before_say_what_they_are_for(empty_url: str) -> None:
    batches = {"responses": "true, NULL", "part": "false, 'own'", "own": "false, NULL"}
    columns = "(deduplicated_requests, holds_responses, part_of, input_file_id, id,"
    rows = [
        _BATCH.replace("input_file_id, ", "")
        .replace("(id,", columns)
        .replace("('b',", f"(0, {hidden}, '{name}', '{name}',")
        .replace("'f', ", "")
        for name, hidden in batches.items()
    ]
    files = {"responses": True, "part": True, "stage": True, "own": False}
    rows += [
        "INSERT INTO files (id, holds_responses, tenant, purpose, filename, size_bytes, sha256, "  # noqa: S608 - constants
        f"storage_key, created_at) VALUES ('{name}', {hidden}, 't', 'batch', 'f', 1, '', 'k', 1)"
        for name, hidden in files.items()
    ]
    await _migrated_to(empty_url, "0035", *rows)
    async with open_store(empty_url, migrate=True) as store:
        of_batches = {name: (await store.batches.get(name)).hidden_for for name in batches}
        of_files = {name: (await store.files.get(name)).hidden_for for name in files}
    assert of_batches == {"responses": "responses", "part": "chain", "own": None}
    assert of_files == {**of_batches, "stage": "chain"}


def test_the_revisions_are_those_of_alembic() -> None:
    """We read their files' names, because Alembic takes long to import."""
    scripts = ScriptDirectory.from_config(migrations_config())
    assert _our_revisions() == tuple(script.revision for script in scripts.walk_revisions())


async def test_the_webhook_of_a_batch_of_before_is_kept_sealed(empty_url: str) -> None:
    sealing_key = new_sealing_key()
    url = "https://hook.example/in?token=1"
    token = Fernet(sealing_key).encrypt(url.encode()).decode()
    await _migrated_to(
        empty_url,
        "0009",
        _BATCH.replace("(id,", "(deduplicated_requests, webhook_location, id,").replace(
            "('b',", f"(0, '{token}', 'b',"
        ),
    )
    async with open_store(empty_url, keys=[sealing_key], migrate=True) as store:
        locations = await store.batch_places.locations("b")
    assert locations == BatchLocations(receivers={DeliveryKind.WEBHOOK: url})


async def test_many_who_start_at_once_migrate_once(empty_url: str) -> None:
    async def start() -> None:
        async with open_store(empty_url, migrate=True) as store:
            await store.batches.create(new_batch())

    await asyncio.gather(*(start() for _ in range(6)))


def test_processes_that_start_at_once_migrate_once(empty_url: str) -> None:
    program = (
        "import asyncio, sys; from batchyard.store import open_store\n"
        "async def main():\n"
        "    async with open_store(sys.argv[1], migrate=True): pass\n"
        "asyncio.run(main())"
    )
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", program, empty_url], cwd=root) for _ in range(2)
    ]
    assert [process.wait(PATIENCE * 30) for process in started] == [0, 0]


async def test_a_database_that_was_not_migrated_is_refused(empty_url: str) -> None:
    with pytest.raises(StoreError, match="no tables yet: run `batchyard migrate`"):
        async with open_store(empty_url):
            pass


@pytest.mark.parametrize("migrate", [True, False])
async def test_a_database_of_a_later_version_is_refused(empty_url: str, migrate: bool) -> None:
    def leap(connection: Connection) -> None:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()

    await _migrated_and(empty_url, leap)
    with pytest.raises(StoreError, match="newer than this version"):
        async with open_store(empty_url, migrate=migrate):
            pass


async def _migrated_to(url: str, revision: str, *statements: str) -> None:
    """An older version's database, after these statements."""

    def migrate(connection: Connection) -> None:
        config = migrations_config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    async def work(connection: AsyncConnection) -> None:
        await connection.run_sync(migrate)
        for statement in statements:
            await connection.execute(text(statement))

    database = Database(url, migrates=True)
    await database.write(work)
    await database.close()


async def _migrated_and(url, work):
    async def run(connection: AsyncConnection):
        return await connection.run_sync(work)

    async with open_store(url, migrate=True) as store:
        return await store.database.read(run)


def _index(index) -> tuple[object, ...]:
    options = index.get("dialect_options", {})
    where = [str(value) for name, value in sorted(options.items()) if name.endswith("_where")]
    return (index["name"], tuple(index["column_names"]), bool(index["unique"]), *where)


async def test_what_ended_before_there_were_accounts_is_counted_without_a_price(
    empty_url: str,
) -> None:
    ended = _BATCH.replace("(id,", "(deduplicated_requests, completed_at, id,").replace(
        "('b',", "(0, 2, 'b',"
    )
    await _migrated_to(empty_url, "0012", ended)
    async with open_store(empty_url, migrate=True) as store:
        (record,) = await store.usage.of_batch("b")
    assert (record.tenant, record.model, record.ended_at) == ("t", "", 2)
    assert (record.requests, record.cost) == (3, None)
