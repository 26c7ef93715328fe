"""The database's clock, as SQL: the one clock for leases and timestamps. No local time here.

Hosts disagree about the time; a lease that one host grants and another judges needs one judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Double, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


# Functions, for SQLAlchemy keeps no compiled statement that holds an element of another kind.
class clock(FunctionElement[float]):  # noqa: N801 - it reads as an SQL function
    """Unix time in seconds with a fraction of at least a millisecond."""

    inherit_cache = True
    type = Double()


class clock_seconds(FunctionElement[int]):  # noqa: N801 - it reads as an SQL function
    """Unix time in whole seconds, rounded down: what clients see as ``created_at``."""

    inherit_cache = True
    type = BigInteger()


# unixepoch('subsec') would say it more plainly, but is NULL before SQLite 3.42.
@compiles(clock, "sqlite")
def _sqlite_clock(element: clock, compiler: Any, **kwargs: Any) -> str:  # noqa: ARG001 - what SQLAlchemy passes
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock_seconds, "sqlite")
def _sqlite_seconds(element: clock_seconds, compiler: Any, **kwargs: Any) -> str:  # noqa: ARG001 - what SQLAlchemy passes
    return "CAST(strftime('%s', 'now') AS INTEGER)"


# A sub-select is evaluated once per statement; a bare volatile call, once per row.
@compiles(clock, "postgresql")
def _postgresql_clock(element: clock, compiler: Any, **kwargs: Any) -> str:  # noqa: ARG001 - what SQLAlchemy passes
    return "(SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision))"


@compiles(clock_seconds, "postgresql")
def _postgresql_seconds(
    element: clock_seconds,  # noqa: ARG001 - what SQLAlchemy passes
    compiler: Any,  # noqa: ARG001 - see above
    **kwargs: Any,  # noqa: ARG001 - see above
) -> str:
    return "(SELECT CAST(floor(extract(epoch FROM clock_timestamp())) AS bigint))"


async def read_seconds(connection: AsyncConnection) -> int:
    """The time in whole seconds, for rows whose several times must agree to the second."""
    return (await connection.execute(select(clock_seconds()))).scalar_one()
