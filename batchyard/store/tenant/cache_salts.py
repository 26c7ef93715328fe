"""Cache salts: what separates the prompts of one scope from all others in an engine's cache."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from sqlalchemy import select, type_coerce
from sqlmodel import Field

from batchyard.store.columns import Row
from batchyard.store.sealed import OpenedOrNone, Sealed
from batchyard.store.upsert import upsert

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.database import Database

_SALT_BYTES: Final = 32
"""As vLLM recommends: 256 bits, 43 characters."""


class CacheSaltRow(Row, table=True):
    """One row for each scope that was ever served; a scope is a tenant, or a group of them."""

    __tablename__ = "cache_salts"

    scope: str = Field(primary_key=True)
    salt: str = Field(sa_type=Sealed)


_SALTS = CacheSaltRow.metadata.tables["cache_salts"]


class CacheSalts:
    """The only writer of ``cache_salts``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, scope: str) -> str:
        """The salt of ``scope``: random, made when it is first asked for, and then kept.

        One that none of the sealing keys opens is replaced: that costs a cold cache and no batch.
        """
        salt = type_coerce(_SALTS.c.salt, OpenedOrNone)
        statement = select(salt).where(_SALTS.c.scope == scope)

        async def read(connection: AsyncConnection) -> str | None:
            return (await connection.execute(statement)).scalar_one_or_none()

        async def make(connection: AsyncConnection) -> str | None:
            new = {"salt": secrets.token_urlsafe(_SALT_BYTES)}
            # Of two who see none, one makes it; both read what is there afterwards.
            await upsert(connection, _SALTS, {"scope": scope, **new}, {})
            found = await read(connection)
            if found is not None:
                return found
            await upsert(connection, _SALTS, {"scope": scope, **new}, new)
            return new["salt"]

        found = await self._database.read(read)
        return found or str(await self._database.write(make))
