"""Every change of an upload: a file that arrives in parts. Their bytes are ``storage``'s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import and_, case, delete, func, insert, select, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds, read_seconds
from batchyard.errors import RecordNotFound, RequestRefused, TransitionConflict
from batchyard.store.file.files import insert_file, load_file
from batchyard.store.tables.upload import (
    PARTS,
    UPLOADS,
    NewPart,
    NewUpload,
    PartRecord,
    UploadRecord,
)
from batchyard.store.tenant.tenants import hold_quota
from batchyard.wire import new_part_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.file import FileRecord, NewFile
    from batchyard.store.tenant.tenants import Quota
    from batchyard.wire import UploadStatus

_ID_LENGTH: Final = len(new_part_id())
_IS_OVERDUE = and_(UPLOADS.c.status == "pending", UPLOADS.c.expires_at <= clock_seconds())
_IS_OPEN = and_(UPLOADS.c.status == "pending", UPLOADS.c.expires_at > clock_seconds())
_RECORD = [
    *(column for column in UPLOADS.c if column.name != "status"),
    case((_IS_OVERDUE, "expired"), else_=UPLOADS.c.status).label("status"),
]


class Uploads(Aggregate):
    """The only writer of ``uploads`` and their parts.

    Methods that name an upload raise :class:`~batchyard.errors.RecordNotFound` where there is
    none, or where it is not the ``tenant``'s.
    """

    @writes
    async def create(
        self, connection: AsyncConnection, new: NewUpload, *, quota: Quota | None = None
    ) -> UploadRecord:
        """Begin an upload; it is ``pending`` until it is completed, cancelled, or expires.

        Its bytes count as stored from now on. ``quota`` is for a tenant that has none of its own;
        None: the upload begins whatever the quota is. Raises
        :class:`~batchyard.errors.StorageLimitExceeded`.
        """
        if quota is not None:
            await hold_quota(connection, new.tenant, quota, stored_bytes=new.bytes)
        values = new.model_dump(exclude={"lifetime_seconds"})
        now = await read_seconds(connection)
        times = {"created_at": now, "expires_at": now + new.lifetime_seconds}
        await connection.execute(insert(UPLOADS).values(status="pending", **times, **values))
        return await _load(connection, new.id)

    @reads
    async def get(
        self, connection: AsyncConnection, upload_id: str, tenant: str | None = None
    ) -> UploadRecord:
        """The upload."""
        return await _load(connection, upload_id, tenant)

    @writes
    async def add_part(
        self,
        connection: AsyncConnection,
        upload_id: str,
        part: NewPart,
        *,
        quota: Quota | None = None,
        tenant: str | None = None,
    ) -> PartRecord:
        """Record a part. Many may come at once, in any order.

        ``quota`` is as for :meth:`create`: parts may have more bytes together than was announced,
        and those count as well. Raises
        :class:`~batchyard.errors.TransitionConflict` unless the upload is pending, and
        :class:`~batchyard.errors.StorageLimitExceeded`; then the part's bytes are the caller's to
        wipe.
        """
        # Parts wait for the upload's end, and for each other only where they are added up.
        upload = await _load_pending(connection, upload_id, tenant, alone=quota is not None)
        if quota is not None:
            more = await _bytes_beyond(connection, upload, part)
            await hold_quota(connection, upload.tenant, quota, stored_bytes=more)
        await connection.execute(
            insert(PARTS).values(
                upload_id=upload_id, created_at=clock_seconds(), **part.model_dump()
            )
        )
        found = await connection.execute(select(PARTS).where(PARTS.c.id == part.id))
        return PartRecord.read(found.mappings().one())

    @reads
    async def chosen_parts(
        self,
        connection: AsyncConnection,
        upload_id: str,
        part_ids: Sequence[str],
        *,
        tenant: str | None = None,
    ) -> list[PartRecord]:
        """The parts that would make the file, in this order: the checks of :meth:`complete`.

        Raises as that does.
        """
        upload = await _load(connection, upload_id, tenant)
        _check_pending(upload)
        return await _choose(connection, upload, part_ids)

    @writes
    async def complete(
        self,
        connection: AsyncConnection,
        upload_id: str,
        part_ids: Sequence[str],
        file: NewFile,
        *,
        tenant: str | None = None,
        fingerprint: str | None = None,
    ) -> tuple[UploadRecord, FileRecord]:
        """End as ``completed``, with the row of the file, which is the upload's tenant's.

        The file's bytes, those of the parts in this order, are already durable. Of many who
        complete or cancel at once one succeeds. ``fingerprint`` is a hash of the request, for
        :meth:`completed`; without it no request counts as the same. Raises
        :class:`~batchyard.errors.TransitionConflict` unless the upload is pending, and
        :class:`~batchyard.errors.RequestRefused` for parts that are not its own, that are named
        twice, or that do not add up to its ``bytes``.
        """
        values = {"file_id": file.id, "completion_fingerprint": fingerprint}
        upload = await _end(connection, upload_id, tenant, "completed", **values)
        await _choose(connection, upload, part_ids)
        await insert_file(connection, file.model_copy(update={"tenant": upload.tenant}))
        return upload, await load_file(connection, file.id)

    @reads
    async def completed(
        self,
        connection: AsyncConnection,
        upload_id: str,
        fingerprint: str,
        *,
        tenant: str | None = None,
    ) -> tuple[UploadRecord, FileRecord] | None:
        """The upload and its file, if the request with this fingerprint has completed it.

        None as well if the file has expired or was deleted meanwhile.
        """
        upload = await _load(connection, upload_id, tenant)
        if upload.file_id is None or upload.completion_fingerprint != fingerprint:
            return None
        try:
            return upload, await load_file(connection, upload.file_id, upload.tenant)
        except RecordNotFound:
            return None

    @writes
    async def cancel(
        self, connection: AsyncConnection, upload_id: str, tenant: str | None = None
    ) -> UploadRecord:
        """End as ``cancelled``; a second time changes nothing.

        Raises :class:`~batchyard.errors.TransitionConflict` for one that ended in another way.
        """
        try:
            return await _end(connection, upload_id, tenant, "cancelled")
        except TransitionConflict:
            upload = await _load(connection, upload_id, tenant)
            if upload.status == "cancelled":
                return upload
            raise

    @reads
    async def expired(self, connection: AsyncConnection, limit: int) -> list[UploadRecord]:
        """Uploads past their time that are not marked yet, the longest expired first."""
        statement = (
            select(*_RECORD)
            .where(_IS_OVERDUE)
            .order_by(UPLOADS.c.expires_at, UPLOADS.c.id)
            .limit(limit)
        )
        rows = (await connection.execute(statement)).mappings()
        return [UploadRecord.read(row) for row in rows]

    @writes
    async def expire(self, connection: AsyncConnection, upload_ids: Sequence[str]) -> set[str]:
        """Mark these uploads as expired; returns the ids of those that this call marked."""
        statement = (
            update(UPLOADS)
            .where(UPLOADS.c.id.in_(upload_ids), _IS_OVERDUE)
            .values(status="expired")
            .returning(UPLOADS.c.id)
        )
        return set((await connection.execute(statement)).scalars())

    @reads
    async def leftover_parts(self, connection: AsyncConnection, limit: int) -> list[PartRecord]:
        """Parts of uploads that have ended in any way: no longer needed.

        Delete their bytes, and then call :meth:`forget_parts`.
        """
        statement = (
            select(PARTS)
            .join(UPLOADS, UPLOADS.c.id == PARTS.c.upload_id)
            .where(UPLOADS.c.status != "pending")
            .order_by(PARTS.c.created_at, PARTS.c.id)
            .limit(limit)
        )
        rows = (await connection.execute(statement)).mappings()
        return [PartRecord.read(row) for row in rows]

    @reads
    async def parts_of(self, connection: AsyncConnection, upload_id: str) -> list[PartRecord]:
        """Its parts whose bytes are not wiped yet, in the order in which they came."""
        statement = (
            select(PARTS)
            .where(PARTS.c.upload_id == upload_id)
            .order_by(PARTS.c.created_at, PARTS.c.id)
        )
        rows = (await connection.execute(statement)).mappings()
        return [PartRecord.read(row) for row in rows]

    @writes
    async def forget_parts(self, connection: AsyncConnection, part_ids: Sequence[str]) -> None:
        """Remove the rows of parts whose bytes are wiped."""
        ended = select(UPLOADS.c.id).where(UPLOADS.c.status != "pending")
        statement = delete(PARTS).where(PARTS.c.id.in_(part_ids), PARTS.c.upload_id.in_(ended))
        await connection.execute(statement)

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete uploads whose hour was over that long ago, and that have no part left: how many.

        Until then, the same request can complete one again.
        """
        statement = delete(UPLOADS).where(
            UPLOADS.c.status != "pending",
            UPLOADS.c.expires_at < clock_seconds() - int(older_than_seconds),
            UPLOADS.c.id.not_in(select(PARTS.c.upload_id)),
        )
        return (await connection.execute(statement)).rowcount


async def _load(
    connection: AsyncConnection, upload_id: str, tenant: str | None = None
) -> UploadRecord:
    statement = select(*_RECORD).where(UPLOADS.c.id == upload_id)
    if tenant is not None:
        statement = statement.where(UPLOADS.c.tenant == tenant)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise RecordNotFound(f"No upload found with id '{upload_id}'.")
    return UploadRecord.read(row)


async def _load_pending(
    connection: AsyncConnection, upload_id: str, tenant: str | None, *, alone: bool
) -> UploadRecord:
    """The upload, kept from ending until this transaction does.

    ``alone``: from getting other parts as well.
    """
    await connection.execute(
        select(UPLOADS.c.id).where(UPLOADS.c.id == upload_id).with_for_update(read=not alone)
    )
    upload = await _load(connection, upload_id, tenant)
    _check_pending(upload)
    return upload


async def _bytes_beyond(connection: AsyncConnection, upload: UploadRecord, part: NewPart) -> int:
    """How many bytes of the part are more than was announced for all."""
    sums = select(func.sum(PARTS.c.size_bytes)).where(PARTS.c.upload_id == upload.id)
    stored = int((await connection.execute(sums)).scalar_one() or 0)
    return min(part.size_bytes, max(0, stored + part.size_bytes - upload.bytes))


def _check_pending(upload: UploadRecord) -> None:
    if upload.status != "pending":
        raise _has_ended(upload)


def _has_ended(upload: UploadRecord) -> TransitionConflict:
    return TransitionConflict(
        f"Upload '{upload.id}' is {upload.status} and takes no more changes; create another."
    )


async def _end(
    connection: AsyncConnection,
    upload_id: str,
    tenant: str | None,
    target: UploadStatus,
    **values: str | None,
) -> UploadRecord:
    statement = update(UPLOADS).where(UPLOADS.c.id == upload_id, _IS_OPEN)
    if tenant is not None:
        statement = statement.where(UPLOADS.c.tenant == tenant)
    ended = await connection.execute(statement.values(status=target, **values))
    upload = await _load(connection, upload_id, tenant)
    if ended.rowcount == 0:
        raise _has_ended(upload)
    return upload


async def _choose(
    connection: AsyncConnection, upload: UploadRecord, part_ids: Sequence[str]
) -> list[PartRecord]:
    """The upload's parts with these ids, in this order."""
    if not part_ids:
        raise _refused("part_ids names no part.")
    if len(set(part_ids)) < len(part_ids):
        raise _refused("part_ids names a part more than once.")
    found = await connection.execute(select(PARTS).where(PARTS.c.upload_id == upload.id))
    parts = {row["id"]: PartRecord.read(row) for row in found.mappings()}
    unknown = [part_id for part_id in part_ids if part_id not in parts]
    if unknown:
        raise _refused(f"Upload '{upload.id}' has no part '{unknown[0][:_ID_LENGTH]}'.")
    chosen = [parts[part_id] for part_id in part_ids]
    total = sum(part.size_bytes for part in chosen)
    if total != upload.bytes:
        raise _refused(
            f"The parts have {total:,} bytes together, and the upload was announced with "
            f"{upload.bytes:,}."
        )
    return chosen


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="part_ids", code="invalid_value")
