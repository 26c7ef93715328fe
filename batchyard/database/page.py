"""Pages of a listing: a strict order, by ``created_at`` and then ``id``, and places in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from sqlalchemy import tuple_

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from sqlalchemy import Select, Table

T = TypeVar("T")

Order = Literal["asc", "desc"]
"""The order of ``created_at``: oldest or newest first."""


class Page(list[T]):
    """Up to ``limit`` records of a listing, in its order."""

    def __init__(self, found: Iterable[T], *, limit: int) -> None:
        """``found``: one more than ``limit`` shows that there are more."""
        super().__init__(found)
        self.has_more = len(self) > limit
        del self[limit:]


def from_place(
    statement: Select[Any],
    table: Table,
    *,
    order: Order,
    limit: int,
    after: tuple[int, str] | None,
) -> Select[Any]:
    """What ``statement`` selects, in order, behind the place ``after``; one more than ``limit``.

    ``after`` is the ``created_at`` and ``id`` of the last record of the page before. The two
    together are the order, so a page neither repeats nor skips what came in the same second.
    """
    place = tuple_(table.c.created_at, table.c.id)
    if after is not None:
        statement = statement.where(place > after if order == "asc" else place < after)
    columns = (table.c.created_at, table.c.id)
    ordered = (each.asc() if order == "asc" else each.desc() for each in columns)
    return statement.order_by(*ordered).limit(limit + 1)
