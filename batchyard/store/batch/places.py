"""Where the input of a batch comes from, and where its results go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from sqlalchemy import select, type_coerce, update

from batchyard.batch.prices import NO_PRICES
from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.sealed import OpenedOrNone
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import STOPPABLE
from batchyard.store.batch.pages import batch_not_found, load_batch, lock_batch
from batchyard.store.tables.batch import BATCHES, LOCATION_COLUMNS, BatchLocations, BatchRecord
from batchyard.store.tables.batch_options import UrlFacts
from batchyard.store.tables.receivers import RECEIVERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.batch_error import InputPart
    from batchyard.database.database import Database


class BatchPlaces(Aggregate):
    """Writes the locations of ``batches``, and what is known of them.

    Methods that name a batch raise :class:`~batchyard.errors.RecordNotFound` where there is none.
    """

    def __init__(self, database: Database, prices: Prices = NO_PRICES) -> None:
        super().__init__(database)
        self._prices = prices

    @reads
    async def locations(self, connection: AsyncConnection, batch_id: str) -> BatchLocations:
        """The user's own places of the input and the results, and the receivers, decrypted.

        Raises :class:`~batchyard.errors.RecordNotFound`.
        """
        found = await connection.execute(
            select(*LOCATION_COLUMNS, RECEIVERS.c.kind, RECEIVERS.c.destination)
            .outerjoin(RECEIVERS, RECEIVERS.c.batch_id == BATCHES.c.id)
            .where(BATCHES.c.id == batch_id)
        )
        rows = found.all()
        if not rows:
            raise batch_not_found(batch_id)
        return BatchLocations(
            rows[0].input_location,
            rows[0].output_location,
            rows[0].error_location,
            {row.kind: row.destination for row in rows if row.kind is not None},
            rows[0].template,
        )

    @reads
    async def destinations(
        self, connection: AsyncConnection, batch_id: str
    ) -> dict[str, str | None]:
        """The places under ``output`` and ``error`` where the user wants that file; None: no key
        opens it.

        A file that is wanted in the object store only is not in it.
        """
        columns = {kind: BATCHES.c[f"{kind}_location"] for kind in ("output", "error")}
        found = await connection.execute(
            select(
                *(type_coerce(each, OpenedOrNone).label(kind) for kind, each in columns.items()),
                *(each.is_not(None).label(f"{kind}_is_set") for kind, each in columns.items()),
            ).where(BATCHES.c.id == batch_id)
        )
        row = found.mappings().one_or_none()
        if row is None:
            raise batch_not_found(batch_id)
        return {kind: row[kind] for kind in columns if row[f"{kind}_is_set"]}

    @writes
    async def redirect(
        self,
        connection: AsyncConnection,
        batch_id: str,
        places: Mapping[str, str],
        expiries: Mapping[str, int | None],
    ) -> BatchRecord:
        """Have result files go to other locations, both by ``output`` and ``error``.

        Raises :class:`~batchyard.errors.TransitionConflict` for a batch whose files are made
        already.
        """
        batch = await lock_batch(connection, batch_id)
        if batch.status not in STOPPABLE:
            raise TransitionConflict(
                f"The files of {batch_id}, which is {batch.status.value}, are made already: ask "
                "again when it has ended."
            )
        urls = batch.options.urls | {
            kind: UrlFacts(expires_at=expiry) for kind, expiry in expiries.items()
        }
        columns = {f"{kind}_location": location for kind, location in places.items()}
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id)
            .values(options=replace(batch.options, urls=urls), **columns)
        )
        return await load_batch(connection, batch_id, prices=self._prices)

    @writes
    async def note_doubts(
        self, connection: AsyncConnection, batch_id: str, doubts: Mapping[str, str]
    ) -> None:
        """Record why URLs could not be asked, by ``output`` and ``error``; of others nothing."""
        batch = await lock_batch(connection, batch_id)
        known = dict.fromkeys([*batch.options.urls, *doubts], UrlFacts()) | batch.options.urls
        urls = {kind: replace(facts, doubt=doubts.get(kind)) for kind, facts in known.items()}
        if urls != batch.options.urls:
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == batch_id)
                .values(options=replace(batch.options, urls=urls))
            )

    @writes
    async def note_parts(
        self, connection: AsyncConnection, batch_id: str, parts: Sequence[InputPart]
    ) -> None:
        """Record how many lines each file has of which the input consists."""
        batch = await lock_batch(connection, batch_id)
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id)
            .values(options=replace(batch.options, parts=tuple(parts)))
        )

    @writes
    async def record_published(
        self, connection: AsyncConnection, batch_id: str, kind: str, location: str
    ) -> None:
        """Record that a result file, which could not be written before, is now at this location.

        ``kind`` is ``output`` or ``error``. Changes nothing if the file was published before.
        """
        column = {"output": "output_location", "error": "error_location"}[kind]
        statement = select(BATCHES.c.undelivered).where(BATCHES.c.id == batch_id)
        found = await connection.execute(statement.with_for_update())
        missing = dict(found.scalar_one_or_none() or {})
        if missing.pop(kind, None) is None:
            return
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id)
            .values({"undelivered": missing or None, column: location})
        )
