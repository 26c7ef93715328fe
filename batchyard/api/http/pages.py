"""Lists: what a client asks for (limit, after, order) and the envelope that it gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Generic, Literal, Protocol, TypeVar, cast

import msgspec
from fastapi import Depends, Query
from pydantic import WithJsonSchema

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.errors import RecordNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Order = Literal["asc", "desc"]


MOST_LISTED: Final = 100
DEFAULT_LISTED: Final = 20


class HasId(Protocol):
    """What a list may hold."""

    @property
    def id(self) -> str:
        """What `after` of the next page names."""
        ...


T = TypeVar("T", bound=HasId)


class ListPage(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One page. ``has_more`` is always a boolean: the SDKs go on until it is false."""

    object: Literal["list"] = "list"
    data: Sequence[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


@dataclass(frozen=True, slots=True)
class Paging:
    """``after``: the id that the page begins behind."""

    limit: int
    after: str | None
    order: Order


def limit_schema(most: int, default: int) -> WithJsonSchema:
    """``limit`` as the OpenAPI document has it. It is read as text, for exact refusals."""
    return WithJsonSchema(
        {
            "type": "integer",
            "minimum": 0,
            "maximum": most,
            "description": f"How many to list; {default} by default.",
        }
    )


After = Annotated[str | None, Query(description="The id after which the page begins.")]


async def asked_page(
    _: Authenticated,
    limit: Annotated[str | None, limit_schema(MOST_LISTED, DEFAULT_LISTED)] = None,
    after: After = None,
) -> Paging:
    """The page that the client asks for, newest first. Raises 400 for what is no page."""
    return read_paging({"limit": limit, "after": after}, most=MOST_LISTED, default=DEFAULT_LISTED)


AskedPage = Annotated[Paging, Depends(asked_page)]


def read_paging(query: Mapping[str, str | None], *, most: int, default: int) -> Paging:
    """Raises 400 for what is no page. ``limit`` 0 is the default, as the SDKs' own tests expect."""
    return Paging(
        limit=_limit(query.get("limit"), most, default),
        after=query.get("after") or None,
        order=_order(query.get("order")),
    )


def to_list_page(items: Sequence[T], *, has_more: bool) -> ListPage[T]:
    """The envelope around ``items``, each of which has an ``id``."""
    return ListPage(
        data=items,
        has_more=has_more,
        first_id=items[0].id if items else None,
        last_id=items[-1].id if items else None,
    )


@contextmanager
def known_cursor(paging: Paging) -> Iterator[None]:
    """Raise a 400 where the block finds that ``after`` names nothing of this tenant.

    Page 1 again would never end.
    """
    try:
        yield
    except RecordNotFound:
        raise ApiError(
            400,
            f"Nothing to list after '{paging.after}': no such id.",
            param="after",
            code="invalid_value",
        ) from None


def _limit(text: str | None, most: int, default: int) -> int:
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ApiError(400, "'limit' must be an integer.", param="limit", code="invalid_type")
    limit = int(text)
    if limit < 0:
        raise ApiError(
            400, "'limit' must be at least 1.", param="limit", code="integer_below_min_value"
        )
    if limit > most:
        raise ApiError(
            400, f"'limit' must be at most {most}.", param="limit", code="integer_above_max_value"
        )
    return limit or default


def _order(text: str | None) -> Order:
    if text not in {None, "", "asc", "desc"}:
        raise ApiError(400, "'order' must be 'asc' or 'desc'.", param="order", code="invalid_value")
    return cast("Order", text or "desc")
