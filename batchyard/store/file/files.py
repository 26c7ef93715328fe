"""Files: what is known about stored bytes. The bytes themselves are ``storage``'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    Text,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds, read_seconds
from batchyard.database.page import Page, from_place
from batchyard.errors import RecordNotFound
from batchyard.lifecycle import UNFINISHED, BatchStatus
from batchyard.store.tables.batch import BATCHES, RESULTS, result_file_ids
from batchyard.store.tables.file import FILES, FileRecord, NewFile
from batchyard.store.tables.upload import UPLOADS
from batchyard.store.tenant.tenants import hold_quota

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.page import Order
    from batchyard.store.tenant.tenants import Quota

_HAS_NOT_ENDED = BATCHES.c.status.in_(UNFINISHED)
_INPUTS = select(BATCHES.c.input_file_id).where(_HAS_NOT_ENDED)
_IS_CURRENT = and_(
    FILES.c.deleted_at.is_(None),
    or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > clock_seconds()),
)
_IS_TO_BE_JOINED = exists().where(
    # Until the batch is planned: then its own input has these lines.
    BATCHES.c.status == BatchStatus.VALIDATING,
    type_coerce(BATCHES.c.options, Text).like('%"file_id":"' + FILES.c.id + '"%'),
)
_IS_UNREAD = and_(
    FILES.c.deleted_at.is_(None),
    FILES.c.id.not_in(_INPUTS),
    ~_IS_TO_BE_JOINED,
)
_MAY_GO = and_(FILES.c.expires_at <= clock_seconds(), _IS_UNREAD)


class Files(Aggregate):
    """The only writer of ``files``.

    With a ``tenant`` a method sees what a client of that tenant is to see: others' files are
    unknown, and so are those past their ``expires_at``, even while a batch still reads one.
    """

    @writes
    async def create(
        self, connection: AsyncConnection, new: NewFile, *, quota: Quota | None = None
    ) -> FileRecord:
        """Record a file.

        ``quota`` is for a tenant that has none of its own; None: the file is recorded whatever
        the quota is. Raises :class:`~batchyard.errors.TransitionConflict` for a taken id, and
        :class:`~batchyard.errors.StorageLimitExceeded`.
        """
        # One that is recorded already, by an owner of its batch before, must not count twice.
        recorded = select(FILES.c.id).where(FILES.c.id == new.id)
        if quota is not None and (await connection.execute(recorded)).first() is None:
            await hold_quota(connection, new.tenant, quota, stored_bytes=new.size_bytes)
        await insert_file(connection, new)
        return await load_file(connection, new.id)

    @reads
    async def get(
        self, connection: AsyncConnection, file_id: str, tenant: str | None = None
    ) -> FileRecord:
        """The file. Raises :class:`~batchyard.errors.RecordNotFound`, for a deleted one too."""
        return await load_file(connection, file_id, tenant)

    @reads
    async def recorded(self, connection: AsyncConnection, file_id: str) -> FileRecord | None:
        """The file, deleted or not; None: it was never recorded."""
        found = await connection.execute(select(FILES).where(FILES.c.id == file_id))
        row = found.mappings().one_or_none()
        return None if row is None else FileRecord.read(row)

    @reads
    async def page(
        self,
        connection: AsyncConnection,
        tenant: str,
        *,
        limit: int,
        purpose: str | None = None,
        order: Order = "desc",
        after: str | None = None,
    ) -> Page[FileRecord]:
        """The tenant's files, by ``created_at`` and ``id``, behind the file ``after``.

        Raises :class:`~batchyard.errors.RecordNotFound` for an ``after`` that never was a file
        of the tenant. One that was deleted meanwhile still marks its place.
        """
        statement = select(FILES).where(
            FILES.c.tenant == tenant, _IS_CURRENT, FILES.c.hidden_for.is_(None)
        )
        if purpose is not None:
            statement = statement.where(FILES.c.purpose == purpose)
        place = None if after is None else await _place(connection, after, tenant)
        found = await connection.execute(
            from_place(statement, FILES, order=order, limit=limit, after=place)
        )
        return Page((FileRecord.read(row) for row in found.mappings()), limit=limit)

    @writes
    async def delete(
        self, connection: AsyncConnection, file_id: str, tenant: str | None = None
    ) -> FileRecord:
        """Mark the file deleted and return it, so that the caller can wipe ``storage_key``.

        Raises :class:`~batchyard.errors.RecordNotFound`, for a second time too.
        """
        record = await load_file(connection, file_id, tenant)
        marked = await connection.execute(
            update(FILES)
            .where(FILES.c.id == file_id, FILES.c.deleted_at.is_(None))
            .values(deleted_at=clock_seconds())
        )
        if marked.rowcount == 0:
            raise _not_found(file_id)
        return record

    @reads
    async def expired(self, connection: AsyncConnection, limit: int) -> list[FileRecord]:
        """Files past their ``expires_at``, the longest expired first.

        The input of a batch that has not ended is not among them, however old it is, nor is a file
        that is still to be joined to one.
        """
        found = await connection.execute(
            select(FILES).where(_MAY_GO).order_by(FILES.c.expires_at, FILES.c.id).limit(limit)
        )
        return [FileRecord.read(row) for row in found.mappings()]

    @writes
    async def delete_expired(
        self, connection: AsyncConnection, file_ids: Sequence[str]
    ) -> set[str]:
        """Mark them deleted; the ids of those that this call marked.

        One that was deleted meanwhile, or that a batch has been created with, is left out.
        """
        marked = await connection.execute(
            update(FILES)
            .where(FILES.c.id.in_(file_ids), _MAY_GO)
            .values(deleted_at=clock_seconds())
            .returning(FILES.c.id)
        )
        return set(marked.scalars())

    @writes
    async def delete_unread(
        self, connection: AsyncConnection, file_ids: Sequence[str]
    ) -> list[FileRecord]:
        """Mark them deleted before their time; those that this call marked.

        One that a batch which has not ended reads is left out.
        """
        marked = await connection.execute(
            update(FILES)
            .where(FILES.c.id.in_(file_ids), _IS_UNREAD)
            .values(deleted_at=clock_seconds())
            .returning(FILES)
        )
        return [FileRecord.read(row) for row in marked.mappings()]

    @reads
    async def long_deleted(
        self, connection: AsyncConnection, seconds: float, limit: int
    ) -> list[str]:
        """The ids of files that were deleted that long ago, without those that batches still name.

        The first row of all stays: it says since when this database has been in use.
        """
        first = select(func.min(FILES.c.created_at)).scalar_subquery()
        found = await connection.execute(
            select(FILES.c.id)
            .where(
                FILES.c.deleted_at < clock_seconds() - int(seconds),
                FILES.c.created_at > first,
                FILES.c.id.not_in(_INPUTS),
            )
            .limit(limit)
        )
        return list(found.scalars())

    @writes
    async def forget(self, connection: AsyncConnection, file_ids: Sequence[str]) -> None:
        """Delete the rows of files that are marked deleted; until then they mark their place."""
        statement = delete(FILES).where(
            FILES.c.id.in_(file_ids), FILES.c.deleted_at.is_not(None), FILES.c.id.not_in(_INPUTS)
        )
        await connection.execute(statement)

    @reads
    async def storage_keys(self, connection: AsyncConnection, keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that hold the bytes of a file which is not deleted."""
        found = await connection.execute(
            select(FILES.c.storage_key).where(
                FILES.c.storage_key.in_(keys), FILES.c.deleted_at.is_(None)
            )
        )
        return set(found.scalars())

    @reads
    async def is_input(self, connection: AsyncConnection, file_id: str) -> bool:
        """Whether it is the input of a batch that has not ended."""
        reads_it = select(BATCHES.c.id).where(_HAS_NOT_ENDED, BATCHES.c.input_file_id == file_id)
        return (await connection.execute(reads_it.limit(1))).first() is not None

    @reads
    async def awaited(self, connection: AsyncConnection) -> set[str]:
        """The ids of the files that batches which have not ended read, or may yet publish.

        For the sweep: with many batches it takes seconds.
        """
        ids: set[str] = set()
        found = await connection.execute(
            select(BATCHES.c.input_file_id, *RESULTS).where(_HAS_NOT_ENDED)
        )
        for input_file_id, *results in found:
            ids |= {input_file_id, *result_file_ids(*results)}
        return ids

    @reads
    async def known(self, connection: AsyncConnection, file_ids: Sequence[str]) -> set[str]:
        """Those of ``file_ids`` that were ever recorded, deleted or not."""
        found = await connection.execute(select(FILES.c.id).where(FILES.c.id.in_(file_ids)))
        return set(found.scalars())

    @reads
    async def known_since(self, connection: AsyncConnection) -> int | None:
        """When the first batch, file or upload was recorded, Unix seconds; None: nothing was."""
        firsts = [
            (await connection.execute(select(func.min(table.c.created_at)))).scalar_one()
            for table in (FILES, BATCHES, UPLOADS)
        ]
        return min((first for first in firsts if first is not None), default=None)


async def insert_file(connection: AsyncConnection, new: NewFile) -> None:
    """Record a file within a transaction, perhaps another aggregate's."""
    values = new.model_dump(exclude={"lifetime_seconds"})
    now = await read_seconds(connection)
    expires_at = None if new.lifetime_seconds is None else now + new.lifetime_seconds
    await connection.execute(insert(FILES).values(created_at=now, expires_at=expires_at, **values))


async def load_file(
    connection: AsyncConnection, file_id: str, tenant: str | None = None
) -> FileRecord:
    """The file, as :meth:`Files.get` finds it, within a transaction.

    Raises :class:`~batchyard.errors.RecordNotFound`.
    """
    statement = select(FILES).where(FILES.c.id == file_id, FILES.c.deleted_at.is_(None))
    if tenant is not None:
        statement = statement.where(FILES.c.tenant == tenant, _IS_CURRENT)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise _not_found(file_id)
    return FileRecord.read(row)


async def _place(connection: AsyncConnection, file_id: str, tenant: str) -> tuple[int, str]:
    found = await connection.execute(
        select(FILES.c.created_at, FILES.c.id).where(
            FILES.c.id == file_id, FILES.c.tenant == tenant
        )
    )
    row = found.one_or_none()
    if row is None:
        raise _not_found(file_id)
    return row.created_at, row.id


def _not_found(file_id: str) -> RecordNotFound:
    return RecordNotFound(f"No file found with id '{file_id}'.")
