"""API keys: whose a secret is, and what it allows. The secret itself is kept nowhere."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Index, and_, false, func, insert, or_, select, true, update
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.columns import Record, Row
from batchyard.errors import KeyExpired, RecordNotFound, StoreUnavailable
from batchyard.store.tables.audit import note_action

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import RowMapping
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

_BEGINNING: Final = "sk-by-"
_SECRET_BYTES: Final = 24
_SHOWN: Final = 4
"""Characters of the secret that its prefix shows. 24 bits of 192: what is left is a secret."""
_NOTE_SECONDS: Final = 60
_RIGHTS: Final = ("is_operator", "may_write", "expires_at")


class ApiKeyRecord(Record):
    """A key, less its secret. Times are Unix seconds."""

    id: str = Field(primary_key=True)
    tenant: str
    name: str
    prefix: str
    """How the secret begins, to tell keys apart."""
    created_at: int = Field(sa_type=BigInteger)
    last_used_at: int | None = Field(sa_type=BigInteger)
    """The last use, to the minute; None: never used."""
    revoked_at: int | None = Field(sa_type=BigInteger)
    is_operator: bool = Field(sa_column_kwargs={"server_default": false()})
    may_write: bool = Field(sa_column_kwargs={"server_default": true()})
    expires_at: int | None = Field(sa_type=BigInteger)

    def is_valid(self, now: float) -> bool:
        """Whether requests may use it: it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)


class ApiKeyRow(Row, ApiKeyRecord, table=True):
    """One row for each key, never deleted; a revoked key is marked.

    ``key_hash`` is the SHA-256 of the secret, lower-case hex. The secret is long and random, so
    no salt and no slow hash is needed, and one read of an index finds it.
    """

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "key_hash", unique=True),)

    key_hash: str


KEYS = ApiKeyRow.metadata.tables["api_keys"]
_RECORD = ApiKeyRecord.columns(KEYS)
_USE_IS_NOTED = KEYS.c.last_used_at > clock_seconds() - _NOTE_SECONDS
_USE_IS_NOT_NOTED = or_(KEYS.c.last_used_at.is_(None), ~_USE_IS_NOTED)


HOLDER_COLUMNS: Final = (
    KEYS.c.id.label("key_id"),
    KEYS.c.tenant,
    KEYS.c.is_operator,
    KEYS.c.may_write,
)
IS_KEPT: Final = KEYS.c.revoked_at.is_(None)
HAS_EXPIRED: Final = and_(KEYS.c.expires_at.is_not(None), KEYS.c.expires_at <= clock_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose key it is, and what it allows: of a request, or of a session in a browser."""

    key_id: str
    tenant: str
    is_operator: bool
    """It may see all tenants' batches, and act on them."""
    may_write: bool
    """Whether it may do more than look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just made. ``secret`` cannot be read again."""

    record: ApiKeyRecord
    secret: str = field(repr=False)


class ApiKeys(Aggregate):
    """The only writer of ``api_keys``."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._being_noted: set[str] = set()

    @writes
    async def create(
        self,
        connection: AsyncConnection,
        tenant: str,
        name: str,
        *,
        is_operator: bool = False,
        may_write: bool = True,
        expires_at: int | None = None,
    ) -> NewKey:
        """Make a key for the tenant. ``name`` is for people and need not be unique.

        What a key allows, and its end, cannot be changed afterwards.
        """
        secret = _BEGINNING + secrets.token_urlsafe(_SECRET_BYTES)
        row: dict[str, Any] = {
            "id": f"key_{secrets.token_hex(8)}",
            "tenant": tenant,
            "name": name,
            "key_hash": hashed(secret),
            "prefix": secret[: len(_BEGINNING) + _SHOWN],
            "is_operator": is_operator,
            "may_write": may_write,
            "expires_at": expires_at,
        }
        await connection.execute(insert(KEYS).values(created_at=clock_seconds(), **row))
        shown = {name: row[name] for name in ("tenant", "name", *_RIGHTS)}
        await note_action(connection, "key.created", row["id"], **shown)
        return NewKey(record=await _load(connection, row["id"]), secret=secret)

    async def holder_of(self, secret: str) -> Holder | None:
        """Whose key it is; None if the key is unknown or revoked.

        From time to time this records when the key was last used; a failure of that is ignored.
        Raises :class:`~batchyard.errors.KeyExpired`.
        """
        key_hash = hashed(secret)
        found = await self._find(key_hash)
        if found is None or not hmac.compare_digest(found["key_hash"], key_hash):
            return None
        if found["has_expired"]:
            raise KeyExpired(found["expires_at"])
        if found["is_due"]:
            await self._note_use(found["key_id"])
        return holder(found)

    @reads
    async def list(
        self, connection: AsyncConnection, tenant: str | None = None
    ) -> Sequence[ApiKeyRecord]:
        """All keys, or the tenant's, oldest first, revoked ones as well."""
        statement = select(*_RECORD).order_by(KEYS.c.created_at, KEYS.c.id)
        if tenant is not None:
            statement = statement.where(KEYS.c.tenant == tenant)
        rows = (await connection.execute(statement)).mappings()
        return [ApiKeyRecord.read(row) for row in rows]

    @writes
    async def revoke(self, connection: AsyncConnection, key_id: str) -> ApiKeyRecord:
        """Revoke the key. Revoking it again changes nothing.

        Raises :class:`~batchyard.errors.RecordNotFound`.
        """
        revoked_at = func.coalesce(KEYS.c.revoked_at, clock_seconds())
        await connection.execute(
            update(KEYS).where(KEYS.c.id == key_id).values(revoked_at=revoked_at)
        )
        record = await _load(connection, key_id)
        await note_action(connection, "key.revoked", key_id, tenant=record.tenant, name=record.name)
        return record

    async def _note_use(self, key_id: str) -> None:
        # Of many requests in the same moment one writes, and the others do not wait for it.
        if key_id in self._being_noted:
            return
        self._being_noted.add(key_id)
        try:
            # A database that is too busy to note it may still answer the request itself.
            with suppress(StoreUnavailable):
                await self._write_use(key_id)
        finally:
            self._being_noted.discard(key_id)

    @reads
    async def _find(self, connection: AsyncConnection, key_hash: str) -> RowMapping | None:
        statement = select(
            *HOLDER_COLUMNS,
            KEYS.c.key_hash,
            KEYS.c.expires_at,
            HAS_EXPIRED.label("has_expired"),
            _USE_IS_NOT_NOTED.label("is_due"),
        ).where(KEYS.c.key_hash == key_hash, IS_KEPT)
        return (await connection.execute(statement)).mappings().one_or_none()

    @writes
    async def _write_use(self, connection: AsyncConnection, key_id: str) -> None:
        await connection.execute(
            update(KEYS)
            .where(KEYS.c.id == key_id, _USE_IS_NOT_NOTED)
            .values(last_used_at=clock_seconds())
        )


def holder(row: Mapping[str, Any] | RowMapping) -> Holder:
    """Read the holder from a row with :data:`HOLDER_COLUMNS`."""
    return Holder(**{name: row[name] for name in Holder.__dataclass_fields__})


def hashed(secret: str) -> str:
    """The form in which a random secret is kept. What a client sends need not be valid Unicode."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


async def _load(connection: AsyncConnection, key_id: str) -> ApiKeyRecord:
    found = await connection.execute(select(*_RECORD).where(KEYS.c.id == key_id))
    row = found.mappings().one_or_none()
    if row is None:
        raise RecordNotFound(f"No API key found with id '{key_id}'.")
    return ApiKeyRecord.read(row)
