"""Sessions of browsers, and the codes that open one. Of both only a hash is kept."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Index, delete, insert, or_, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.columns import Row
from batchyard.store.tenant.api_keys import (
    HAS_EXPIRED,
    HOLDER_COLUMNS,
    IS_KEPT,
    KEYS,
    Holder,
    hashed,
    holder,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

SESSION_SECONDS: Final = 8 * 3600
CODE_SECONDS: Final = 10 * 60
"""How long the link that ``batchyard up`` prints can be used."""
_TOKEN_BYTES: Final = 24


class SessionRow(Row, table=True):
    """One row for each session or code, until it is used, ended or expired.

    Both belong to a key, and are worth nothing once that is revoked or expired. ``is_operator``:
    also where the key itself is not; only a process with the database can make a code.
    """

    __tablename__ = "sessions"
    __table_args__ = (Index(None, "expires_at"),)

    token_hash: str = Field(primary_key=True)
    is_code: bool
    key_id: str
    is_operator: bool
    created_at: int = Field(sa_type=BigInteger)
    expires_at: int = Field(sa_type=BigInteger)


_SESSIONS = SessionRow.metadata.tables["sessions"]
_IS_OPERATOR = or_(KEYS.c.is_operator, _SESSIONS.c.is_operator).label("is_operator")
_HOLDER = [each for each in HOLDER_COLUMNS if each.name != "is_operator"] + [_IS_OPERATOR]


class Sessions(Aggregate):
    """The only writer of ``sessions``."""

    @writes
    async def open(self, connection: AsyncConnection, key_id: str) -> str:
        """The token of a new session with the rights of the key."""
        await _forget_expired(connection)
        return await _insert(connection, key_id, SESSION_SECONDS)

    @writes
    async def make_code(self, connection: AsyncConnection, key_id: str) -> str:
        """A code that opens one session, in which the key is an operator's."""
        return await _insert(connection, key_id, CODE_SECONDS, is_code=True, is_operator=True)

    @writes
    async def redeem(self, connection: AsyncConnection, code: str) -> str | None:
        """The token of a new session; None: the code is unknown, used or expired."""
        found = await _find(connection, code, is_code=True)
        # Of two at once one deletes it.
        if found is None or not await _delete(connection, code, is_code=True):
            return None
        return await _insert(
            connection, found.key_id, SESSION_SECONDS, is_operator=found.is_operator
        )

    @reads
    async def holder_of(self, connection: AsyncConnection, token: str) -> Holder | None:
        """Whose session it is; None where it has ended, or where its key is no longer valid."""
        return await _find(connection, token, is_code=False)

    @writes
    async def end(self, connection: AsyncConnection, token: str) -> None:
        """End the session, if there is one."""
        await _delete(connection, token, is_code=False)


async def _find(connection: AsyncConnection, token: str, *, is_code: bool) -> Holder | None:
    statement = (
        select(*_HOLDER)
        .join(_SESSIONS, _SESSIONS.c.key_id == KEYS.c.id)
        .where(
            _SESSIONS.c.token_hash == hashed(token),
            _SESSIONS.c.is_code == is_code,
            _SESSIONS.c.expires_at > clock_seconds(),
            IS_KEPT,
            ~HAS_EXPIRED,
        )
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else holder(row)


async def _insert(
    connection: AsyncConnection,
    key_id: str,
    lifetime_seconds: int,
    *,
    is_code: bool = False,
    is_operator: bool = False,
) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    row: dict[str, Any] = {
        "token_hash": hashed(token),
        "is_code": is_code,
        "key_id": key_id,
        "is_operator": is_operator,
    }
    await connection.execute(
        insert(_SESSIONS).values(
            created_at=clock_seconds(), expires_at=clock_seconds() + lifetime_seconds, **row
        )
    )
    return token


async def _delete(connection: AsyncConnection, token: str, *, is_code: bool) -> bool:
    statement = delete(_SESSIONS).where(
        _SESSIONS.c.token_hash == hashed(token), _SESSIONS.c.is_code == is_code
    )
    return (await connection.execute(statement)).rowcount == 1


async def _forget_expired(connection: AsyncConnection) -> None:
    await connection.execute(delete(_SESSIONS).where(_SESSIONS.c.expires_at <= clock_seconds()))
