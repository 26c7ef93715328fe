"""What every aggregate is made of: a database, and methods that are one transaction each.

A method marked with :func:`reads` or :func:`writes` is given the transaction's connection before
its own arguments; its callers do not see it. No table here.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

A = TypeVar("A", bound="Aggregate")
P = ParamSpec("P")
T = TypeVar("T")


class Aggregate:
    """The base of the classes that read and write tables."""

    def __init__(self, database: Database) -> None:
        self._database = database


def reads(
    work: Callable[Concatenate[A, AsyncConnection, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """The method as one transaction of :meth:`.Database.read`: it must not write."""

    @wraps(work)
    async def method(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(lambda each: work(self, each, *args, **kwargs))

    return method


def writes(
    work: Callable[Concatenate[A, AsyncConnection, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """The method as one transaction of :meth:`.Database.write`.

    It may run more than once, so it must have no effect outside; it must not call another marked
    method.
    """

    @wraps(work)
    async def method(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.write(lambda each: work(self, each, *args, **kwargs))

    return method
