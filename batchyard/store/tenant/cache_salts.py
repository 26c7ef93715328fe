"""Cache salts: what separates the prompts of one scope from all others in an engine's cache."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from sqlalchemy import select, type_coerce
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.columns import Row
from batchyard.database.sealed import OpenedOrNone, Sealed
from batchyard.database.upsert import upsert

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


_SALT_BYTES: Final = 32
"""The size that vLLM recommends: 256 bits, 43 characters."""


class CacheSaltRow(Row, table=True):
    """One row for each scope that was ever served; a scope is a tenant, or a group of them."""

    __tablename__ = "cache_salts"

    scope: str = Field(primary_key=True)
    salt: str = Field(sa_type=Sealed)


_SALTS = CacheSaltRow.metadata.tables["cache_salts"]


class CacheSalts(Aggregate):
    """The only writer of ``cache_salts``."""

    async def get(self, scope: str) -> str:
        """The salt of ``scope``: random, made when it is first asked for, and then kept.

        One that none of the sealing keys opens is replaced: that costs a cold cache and no batch.
        """
        return await self.find(scope) or await self._make(scope)

    @reads
    async def find(self, connection: AsyncConnection, scope: str) -> str | None:
        """The salt of ``scope``; None: none was made yet, or no key opens it."""
        return await _salt(connection, scope)

    @writes
    async def _make(self, connection: AsyncConnection, scope: str) -> str:
        new = {"salt": secrets.token_urlsafe(_SALT_BYTES)}
        # Of two who see none, one makes it; both read what is there afterwards.
        await upsert(connection, _SALTS, {"scope": scope, **new}, {})
        found = await _salt(connection, scope)
        if found is not None:
            return found
        await upsert(connection, _SALTS, {"scope": scope, **new}, new)
        return new["salt"]


async def _salt(connection: AsyncConnection, scope: str) -> str | None:
    """None: there is none, or no key opens it."""
    salt = type_coerce(_SALTS.c.salt, OpenedOrNone)
    found = await connection.execute(select(salt).where(_SALTS.c.scope == scope))
    return found.scalar_one_or_none()
