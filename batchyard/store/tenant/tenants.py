"""Tenants: their turns, their quotas, their e-mail addresses. API keys are in ``api_keys``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Double, case, func, or_, select, union
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock, read_seconds
from batchyard.database.columns import EnumText, Record, Row
from batchyard.database.sealed import Sealed
from batchyard.database.upsert import upsert
from batchyard.errors import (
    BatchLimitExceeded,
    BatchRateExceeded,
    QueueFull,
    QuotaExceeded,
    StorageLimitExceeded,
)
from batchyard.intervals import HOUR_SECONDS
from batchyard.lifecycle import STOPPABLE, UNFINISHED, BatchStatus
from batchyard.store.tables.audit import note_action
from batchyard.store.tables.batch import BATCHES, seen_by
from batchyard.store.tables.chunk import CHUNKS, IS_OPEN, remaining_tokens
from batchyard.store.tables.file import FILES
from batchyard.store.tables.queue_room import waits_behind
from batchyard.store.tables.response import IS_OPEN as RESPONSE_IS_OPEN
from batchyard.store.tables.response import RESPONSES
from batchyard.store.tables.signing_secrets import SecretColumns, secrets_in
from batchyard.store.tables.upload import PARTS, UPLOADS
from batchyard.store.tenant.api_keys import ApiKeyRow
from batchyard.wire import new_signing_secret

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncConnection


class WhenFull(StrEnum):
    """What becomes of a batch for which the quota of enqueued requests or tokens has no room."""

    REFUSE = "refuse"
    """The batch fails."""
    WAIT = "wait"
    """It stays ``validating`` until earlier ones of its tenant are done. One that is larger than
    the whole quota fails."""


class Quota(Record):
    """How much a tenant may have enqueued and stored at once.

    None is no limit; in a tenant's own quota, the default.
    """

    max_active_batches: int | None = Field(default=None, sa_type=BigInteger)
    max_enqueued_requests: int | None = Field(default=None, sa_type=BigInteger)
    max_enqueued_tokens: int | None = Field(default=None, sa_type=BigInteger)
    max_live_requests: int | None = Field(default=None, sa_type=BigInteger)
    """In flight at a time, in each process of the API; 0: live requests are refused."""
    max_stored_bytes: int | None = Field(default=None, sa_type=BigInteger)
    when_full: WhenFull | None = Field(default=None, sa_type=EnumText(WhenFull))

    def over(self, defaults: Quota) -> Quota:
        """This quota, with the limits of ``defaults`` where it has none."""
        return defaults.model_copy(update=self.model_dump(exclude_none=True))


class TenantRow(Row, Quota, table=True):
    """One row for each tenant that was ever served or has settings of its own."""

    __tablename__ = "tenants"

    name: str = Field(primary_key=True)
    served_at: float | None = Field(sa_type=Double)
    notify_email: str | None
    webhook_secret: str | None = Field(sa_type=Sealed)
    old_webhook_secret: str | None = Field(sa_type=Sealed)
    old_webhook_secret_expires_at: int | None = Field(sa_type=BigInteger)


TENANTS = TenantRow.metadata.tables["tenants"]

_SECRETS = SecretColumns(
    TENANTS.c.webhook_secret,
    TENANTS.c.old_webhook_secret,
    TENANTS.c.old_webhook_secret_expires_at,
)
_KEYS = ApiKeyRow.metadata.tables["api_keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What a tenant uses of its quotas.

    A batch is active until it ends. Enqueued is what has no answer yet; of a chunk that has
    begun, its estimated tokens in proportion. Stored are files, until their bytes are deleted,
    uploads that have not ended, and background responses that wait for others.
    """

    active_batches: int = 0
    enqueued_requests: int = 0
    enqueued_tokens: int = 0
    stored_bytes: int = 0


_ALL = tuple(each.name for each in fields(TenantUsage))
_REFUSALS = {"active_batches": BatchLimitExceeded, "stored_bytes": StorageLimitExceeded}
"""What is raised for a quota; of the others :class:`QuotaExceeded`."""


class Tenants(Aggregate):
    """Quotas, their use, addresses. The functions below run in other aggregates' transactions."""

    @reads
    async def quota(self, connection: AsyncConnection, name: str) -> Quota:
        """The tenant's own limits; all None for one that was given none."""
        return await own_quota(connection, name)

    @writes
    async def set_quota(self, connection: AsyncConnection, name: str, quota: Quota) -> None:
        """Give the tenant limits of its own, in place of those that it had."""
        limits = quota.model_dump()
        await upsert(connection, TENANTS, {"name": name, **limits}, limits)
        await note_action(connection, "tenant.quota", name, **limits)

    @reads
    async def usage(self, connection: AsyncConnection, name: str) -> TenantUsage:
        """What of its quotas the tenant uses now; all zeros for an unknown tenant."""
        return await _usage(connection, name)

    @reads
    async def check_room(
        self, connection: AsyncConnection, name: str, defaults: Quota, *, stored_bytes: int
    ) -> None:
        """Raise :class:`~batchyard.errors.StorageLimitExceeded` if so many more are too many now.

        Nothing is held: what is stored is checked again when it is recorded.
        """
        quota = (await own_quota(connection, name)).over(defaults)
        await _check(connection, name, quota, TenantUsage(stored_bytes=stored_bytes))

    @reads
    async def names(self, connection: AsyncConnection) -> list[str]:
        """Every tenant that has a batch, a key or settings of its own."""
        statement = union(select(TENANTS.c.name), select(BATCHES.c.tenant), select(_KEYS.c.tenant))
        return sorted((await connection.execute(statement)).scalars())

    @reads
    async def notify_email(self, connection: AsyncConnection, name: str) -> str | None:
        """The address for batches without an address of their own; None: no e-mail is sent."""
        statement = select(TENANTS.c.notify_email).where(TENANTS.c.name == name)
        return (await connection.execute(statement)).scalar_one_or_none()

    @writes
    async def set_notify_email(
        self, connection: AsyncConnection, name: str, address: str | None
    ) -> None:
        """Send e-mails to this address from now on; None: send none."""
        row = {"notify_email": address}
        await upsert(connection, TENANTS, {"name": name, **row}, row)
        await note_action(connection, "tenant.email", name)

    @writes
    async def rotate_webhook_secret(
        self, connection: AsyncConnection, name: str, *, keep_old: bool
    ) -> str:
        """Create and return a new secret for ``webhook_url`` of batches; it is not shown again.

        With ``keep_old``, the old secret signs as well for another day.
        """
        secret = new_signing_secret()

        await upsert(
            connection,
            TENANTS,
            {"name": name, "webhook_secret": secret},
            _SECRETS.replaced_by(secret, keep_old=keep_old),
        )
        return secret


async def webhook_secrets(
    connection: AsyncConnection, tenants: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The secrets that sign the ``webhook_url`` events of these tenants, the newest first.

    A tenant that has none gets its first. It keeps the tenant's row locked, as :func:`served`.
    """
    statement = select(
        TENANTS.c.name, TENANTS.c.webhook_secret.is_not(None).label("is_set"), *_SECRETS.selected()
    ).where(TENANTS.c.name.in_(sorted(tenants)))
    rows = (await connection.execute(statement)).all()
    missing = set(tenants) - {row.name for row in rows if row.is_set}
    if missing:
        for name in sorted(missing):
            first = {"webhook_secret": new_signing_secret()}
            # Of two who see none, one makes it; both read what is there afterwards.
            is_none = TENANTS.c.webhook_secret.is_(None)
            await upsert(connection, TENANTS, {"name": name, **first}, first, where=is_none)
        rows = (await connection.execute(statement)).all()
    return {row.name: secrets_in(row) for row in rows}


async def served(connection: AsyncConnection, tenant: str) -> None:
    """Record that the tenant has just had its turn.

    Keeps the tenant's row locked until the transaction ends: one that serves several tenants
    names them in sorted order.
    """
    now = {"served_at": clock()}
    await upsert(connection, TENANTS, {"name": tenant, **now}, now)


async def hold_quota(
    connection: AsyncConnection,
    tenant: str,
    defaults: Quota,
    *,
    batches: int = 0,
    requests: int = 0,
    tokens: int = 0,
    stored_bytes: int = 0,
    batch_id: str | None = None,
) -> None:
    """Check that the tenant may have this much more; the caller adds it afterwards.

    ``batch_id``: what is added are the requests of this batch, which may wait.

    Other callers for this tenant wait until this transaction ends, so that two requests that
    each fit do not exceed the quota together. A quota that was lowered refuses new work only,
    not what was accepted before.

    Raises :class:`~batchyard.errors.QuotaExceeded`, for batches its
    :class:`~batchyard.errors.BatchLimitExceeded`, for bytes
    :class:`~batchyard.errors.StorageLimitExceeded`; and :class:`~batchyard.errors.QueueFull` where
    the batch is to wait.
    """
    added = TenantUsage(
        active_batches=batches,
        enqueued_requests=requests,
        enqueued_tokens=tokens,
        stored_bytes=stored_bytes,
    )
    quota = (await own_quota(connection, tenant)).over(defaults)
    if not _limits(quota, added):
        return
    # SQLite has one writer at a time. PostgreSQL needs a row that all of them lock, and a look
    # at what is used that begins after the lock.
    await upsert(connection, TENANTS, {"name": tenant}, {})
    quota = (await own_quota(connection, tenant, lock=True)).over(defaults)
    if batch_id is None:
        await _check(connection, tenant, quota, added)
    else:
        await check_queue(connection, batch_id, tenant, quota, added)


async def hold_pace(connection: AsyncConnection, tenant: str, batches_per_hour: int) -> None:
    """Check that the tenant has created fewer batches in the last hour; the caller adds one.

    Nothing is locked, so a few more may pass in the same moment: this is against clients out of
    control. Raises :class:`~batchyard.errors.BatchRateExceeded`.
    """
    now = await read_seconds(connection)
    created_at = BATCHES.c.created_at
    # Batches from before the clock was set back are dated in the future, and would count for hours.
    lately = (seen_by(tenant), created_at > now - HOUR_SECONDS, created_at <= now)
    made = (await connection.execute(select(func.count()).where(*lately))).scalar_one()
    if made < batches_per_hour:
        return
    # The next batch is possible when enough of these are more than an hour old.
    leaving = select(created_at).where(*lately).order_by(created_at)
    found = await connection.execute(leaving.offset(made - batches_per_hour).limit(1))
    leaves_at = (found.scalar_one_or_none() or now) + HOUR_SECONDS
    raise BatchRateExceeded(
        f"Tenant '{tenant}' may create {batches_per_hour:,} batches an hour: put more requests "
        "into each, or wait.",
        retry_after_seconds=max(1, leaves_at - now),
    )


async def _check(
    connection: AsyncConnection, tenant: str, quota: Quota, added: TenantUsage
) -> None:
    limits = _limits(quota, added)
    usage = await _usage(connection, tenant, limits) if limits else added
    for name, limit in limits.items():
        used, more = getattr(usage, name), getattr(added, name)
        if used + more > limit:
            raise _REFUSALS.get(name, QuotaExceeded)(_refusal(tenant, name, limit, used, more))


async def check_queue(
    connection: AsyncConnection, batch_id: str, tenant: str, quota: Quota, added: TenantUsage
) -> None:
    """Check a batch that is to be enqueued: the first that waits begins first."""
    limits = _limits(quota, added)
    if quota.when_full is not WhenFull.WAIT or any(
        getattr(added, name) > limit for name, limit in limits.items()
    ):
        await _check(connection, tenant, quota, added)
        return
    if not limits:
        return
    behind = select(BATCHES.c.id).where(BATCHES.c.id == batch_id, waits_behind(BATCHES))
    if (await connection.execute(behind)).first() is not None:
        raise QueueFull(f"{batch_id} waits: other batches of tenant '{tenant}' wait before it.")
    try:
        await _check(connection, tenant, quota, added)
    except QuotaExceeded as error:
        raise QueueFull(f"{batch_id} waits: {error}") from None


def _limits(quota: Quota, added: TenantUsage) -> dict[str, int]:
    """The limits that ``added`` must be judged by, under the names of :class:`TenantUsage`."""
    limits = {name: getattr(quota, f"max_{name}") for name, more in asdict(added).items() if more}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _refusal(tenant: str, name: str, limit: int, used: int, more: int) -> str:
    if name == "stored_bytes":
        advice = "Delete files and responses that you no longer need"
    elif more > limit:
        advice = "Split the input into smaller batches"
    else:
        advice = "Wait until earlier batches are done, or cancel one"
    what = name.replace("_", " ")
    return (
        f"Tenant '{tenant}' may have {limit:,} {what}; it has {used:,}, and this would add "
        f"{more:,}. {advice}, or have the quota raised."
    )


async def own_quota(connection: AsyncConnection, tenant: str, *, lock: bool = False) -> Quota:
    """The tenant's own limits, within a transaction; with ``lock``, nobody changes them before its
    end."""
    statement = select(*Quota.columns(TENANTS)).where(TENANTS.c.name == tenant)
    if lock:
        statement = statement.with_for_update()
    row = (await connection.execute(statement)).mappings().one_or_none()
    return Quota() if row is None else Quota.read(row)


async def _usage(
    connection: AsyncConnection, tenant: str, names: Collection[str] = _ALL
) -> TenantUsage:
    """What of ``names`` the tenant uses; the rest may be 0, as it takes time to add up."""
    stored_bytes = await _stored_bytes(connection, tenant) if "stored_bytes" in names else 0
    if not set(names) - {"stored_bytes"}:
        return TenantUsage(stored_bytes=stored_bytes)
    its_own = BATCHES.c.tenant == tenant
    active = select(func.count()).where(seen_by(tenant), BATCHES.c.status.in_(UNFINISHED))
    unanswered = CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed
    enqueued = (
        select(func.sum(unanswered), func.sum(remaining_tokens()))
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(its_own, BATCHES.c.status.in_(STOPPABLE), IS_OPEN)
    )
    batches = (await connection.execute(active)).scalar_one()
    requests, tokens = (await connection.execute(enqueued)).one()
    responses, response_tokens = (await connection.execute(_unplanned_responses(tenant))).one()
    return TenantUsage(
        active_batches=batches,
        # The sum of no rows is NULL.
        enqueued_requests=int(requests or 0) + responses,
        enqueued_tokens=round(tokens or 0) + int(response_tokens or 0),
        stored_bytes=stored_bytes,
    )


async def _stored_bytes(connection: AsyncConnection, tenant: str) -> int:
    """The bytes of files, of uploads, and of background responses until they are in a file.

    An upload counts as announced, or as its parts if they are more. A deleted file counts as long
    as a batch reads it: until then its bytes are kept.
    """
    files = select(func.sum(FILES.c.size_bytes)).where(
        FILES.c.tenant == tenant, FILES.c.deleted_at.is_(None)
    )
    # A tenant could fill the disk with inputs that it deletes once their batches are there.
    unfinished = select(BATCHES.c.input_file_id).where(
        BATCHES.c.tenant == tenant, BATCHES.c.status.in_(UNFINISHED)
    )
    still_read = select(func.sum(FILES.c.size_bytes)).where(
        FILES.c.id.in_(unfinished), FILES.c.tenant == tenant, FILES.c.deleted_at.is_not(None)
    )
    parts = func.coalesce(func.sum(PARTS.c.size_bytes), 0)
    uploads = (
        select(case((parts > UPLOADS.c.bytes, parts), else_=UPLOADS.c.bytes).label("bytes"))
        .outerjoin(PARTS, PARTS.c.upload_id == UPLOADS.c.id)
        .where(UPLOADS.c.tenant == tenant, UPLOADS.c.status == "pending")
        .group_by(UPLOADS.c.id, UPLOADS.c.bytes)
        .subquery()
    )
    lines = select(func.sum(func.length(RESPONSES.c.line))).where(
        RESPONSES.c.tenant == tenant, RESPONSE_IS_OPEN, RESPONSES.c.batch_id.is_(None)
    )
    sums = [files, still_read, select(func.sum(uploads.c.bytes)), lines]
    return sum([int((await connection.execute(each)).scalar_one() or 0) for each in sums])


def _unplanned_responses(tenant: str) -> Select[Any]:
    """How many responses are in no chunk yet, and their tokens."""
    unplanned = select(BATCHES.c.id).where(
        BATCHES.c.tenant == tenant, BATCHES.c.status == BatchStatus.VALIDATING
    )
    return select(func.count(), func.sum(RESPONSES.c.token_estimate)).where(
        RESPONSES.c.tenant == tenant,
        RESPONSE_IS_OPEN,
        or_(RESPONSES.c.batch_id.is_(None), RESPONSES.c.batch_id.in_(unplanned)),
    )
