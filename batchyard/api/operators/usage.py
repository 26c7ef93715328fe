"""``/organization/usage/completions`` and ``/organization/costs``, in OpenAI's shapes.

A tenant is a project. A tenant's key sees its own, an operator's key sees all. What a batch used
is counted at its end, what live requests used at the beginning of their hour; embeddings count as
well, because a batch may mix endpoints.
"""

# ruff: noqa: ARG001 - parameters that describe what is read from the query: lists have two spellings

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import WithJsonSchema

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.errors import missing
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.route import Route
from batchyard.batch.prices import BILLION
from batchyard.intervals import DAY_SECONDS, HOUR_SECONDS, MINUTE_SECONDS
from batchyard.wire import Amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.api.http.auth import Caller
    from batchyard.store import UsageTotal

router = APIRouter(prefix="/organization", route_class=Route)

_WIDTHS: Final = {
    "1m": (MINUTE_SECONDS, 60, 1440),
    "1h": (HOUR_SECONDS, 24, 168),
    "1d": (DAY_SECONDS, 7, 31),
}
"""Seconds, and how many buckets: by default and at most."""
_BOOLEANS: Final = ("true", "false")
_COST_LIMITS: Final = (7, 180)
_COLUMNS: Final = {
    "project_id": "tenant",
    "model": "model",
    "line_item": "model",
    "batch": "is_live",
}
_LATEST: Final = 253_402_300_800
"""The year 10,000."""

_TIME = WithJsonSchema({"type": "integer", "minimum": 0})
_TEXTS = WithJsonSchema({"type": "array", "items": {"type": "string"}})


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was used in a bucket; ``project_id`` and ``model`` are null unless grouped by them."""

    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )
    input_tokens: int
    output_tokens: int
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    input_cached_tokens: int
    input_uncached_tokens: int


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a bucket cost; ``line_item`` is a model."""

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: Amount
    line_item: str | None = None
    project_id: str | None = None


class UsageBucket(msgspec.Struct, frozen=True, kw_only=True):
    """From ``start_time`` until before ``end_time``, in Unix seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult]


class CostBucket(msgspec.Struct, frozen=True, kw_only=True):
    """From ``start_time`` until before ``end_time``, in Unix seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[CostResult]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets in their order. ``next_page`` is the ``page`` that follows."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None = None


class CostPage(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets in their order. ``next_page`` is the ``page`` that follows."""

    object: Literal["page"] = "page"
    data: list[CostBucket]
    has_more: bool
    next_page: str | None = None


class _Period:
    """The buckets that are asked for."""

    def __init__(
        self, request: Request, width: int, now: int, limits: tuple[int, int], limit: str | None
    ) -> None:
        query = request.query_params
        self.width = width
        start = _number("start_time", query.get("start_time"))
        if start is None:
            raise missing("start_time")
        asked_end = _number("end_time", query.get("end_time"))
        self.end = min(now + 1, asked_end) if asked_end is not None else now + 1
        self.start = max(start, _page_start(query.get("page"), width))
        first = self.start // width
        count = _count(limit, *limits)
        last = -(-self.end // width)  # the first that is not asked for
        self.buckets = range(first, max(first, min(first + count, last)))
        self.has_more = bool(self.buckets) and self.buckets.stop < last
        self.end = min(self.end, self.buckets.stop * width)

    @property
    def next_page(self) -> str | None:
        return f"page_{self.buckets.stop * self.width}" if self.has_more else None

    def split(self, totals: list[UsageTotal]) -> Iterator[tuple[int, int, list[UsageTotal]]]:
        """The start and the end of each bucket, and the totals in it."""
        # Once through: a day has 1,440 buckets, and an operator's may have a total for each tenant
        # and model in each of them.
        found: defaultdict[int, list[UsageTotal]] = defaultdict(list)
        for each in totals:
            found[each.bucket].append(each)
        for bucket in self.buckets:
            yield bucket * self.width, (bucket + 1) * self.width, found[bucket]


_StartTime = Annotated[
    str | None, _TIME, Query(description="The beginning, in Unix seconds; required.")
]
_EndTime = Annotated[
    str | None, _TIME, Query(description="The end, which is not included; now by default.")
]
_Projects = Annotated[
    str | None, _TEXTS, Query(description="Only these tenants, for an operator's key.")
]
_Limit = Annotated[
    str | None,
    WithJsonSchema({"type": "integer", "minimum": 1}),
    Query(description="How many buckets."),
]
_PageName = Annotated[str | None, Query(description="`next_page` of the page before.")]


@router.get("/usage/completions", summary="What was used, by time, tenant and model")
async def usage_completions(
    request: Request,
    caller: Authenticated,
    start_time: _StartTime = None,
    end_time: _EndTime = None,
    bucket_width: Annotated[
        str | None, WithJsonSchema({"type": "string", "enum": list(_WIDTHS)})
    ] = None,
    project_ids: _Projects = None,
    models: Annotated[str | None, _TEXTS, Query(description="Only these models.")] = None,
    group_by: Annotated[
        str | None,
        _TEXTS,
        Query(description="`project_id`, which is the tenant, `model` and `batch`."),
    ] = None,
    batch: Annotated[
        str | None,
        WithJsonSchema({"type": "boolean"}),
        Query(description="true: only batches; false: only live requests."),
    ] = None,
    limit: _Limit = None,
    page: _PageName = None,
) -> JsonResponse[UsagePage]:
    """Tokens and requests of batches that have ended and of live requests.

    Live requests count at the beginning of their hour. Lists are repeated parameters. Users, keys
    and service tiers are not recorded: to group by them gives null, and to filter by them is
    refused.
    """
    width, *limits = _WIDTHS[_one_of("bucket_width", bucket_width or "1d", _WIDTHS)]
    groups = _groups(
        request,
        ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"),
    )
    is_live = None if not batch else _one_of("batch", batch, _BOOLEANS) == "false"
    period, totals = await _find(
        request, caller, width, (limits[0], limits[1]), groups, limit=limit, is_live=is_live
    )
    buckets = [
        UsageBucket(
            start_time=start,
            end_time=end,
            results=[_usage_result(each) for each in found],
        )
        for start, end, found in period.split(_without_currencies(totals))
    ]
    return JsonResponse(
        UsagePage(data=buckets, has_more=period.has_more, next_page=period.next_page)
    )


@router.get("/costs", summary="What it cost, by day, tenant and model")
async def costs(
    request: Request,
    caller: Authenticated,
    start_time: _StartTime = None,
    end_time: _EndTime = None,
    project_ids: _Projects = None,
    group_by: Annotated[
        str | None,
        _TEXTS,
        Query(description="`project_id`, which is the tenant, and `line_item`, the model."),
    ] = None,
    limit: _Limit = None,
    page: _PageName = None,
) -> JsonResponse[CostPage]:
    """What batches cost by the prices at their ends, and live requests by those of the moment.

    What had no price is left out.
    """
    width = _WIDTHS[
        _one_of("bucket_width", request.query_params.get("bucket_width") or "1d", ("1d",))
    ]
    groups = _groups(request, ("project_id", "user_id", "line_item", "api_key_id", "api_source"))
    period, totals = await _find(request, caller, width[0], _COST_LIMITS, groups, limit=limit)
    buckets = [
        CostBucket(
            start_time=start,
            end_time=end,
            results=[
                CostResult(
                    amount=Amount(value=each.cost / BILLION, currency=each.currency),
                    line_item=each.model,
                    project_id=each.tenant,
                )
                for each in found
                if each.currency is not None
            ],
        )
        for start, end, found in period.split(totals)
    ]
    return JsonResponse(
        CostPage(data=buckets, has_more=period.has_more, next_page=period.next_page)
    )


async def _find(
    request: Request,
    caller: Caller,
    width: int,
    limits: tuple[int, int],
    groups: set[str],
    *,
    limit: str | None,
    is_live: bool | None = None,
) -> tuple[_Period, list[UsageTotal]]:
    for name in ("user_ids", "api_key_ids", "line_items"):
        if _texts(request, name) is not None:
            raise _invalid(name, f"'{name}' cannot be used: this is not recorded here.")
    store = caller.services.store
    period = _Period(request, width, int(await store.database.now()), limits, limit)
    tenants = _texts(request, "project_ids")
    if caller.sees_tenant is not None:
        own = {caller.sees_tenant}
        tenants = list(own if tenants is None else own & set(tenants))
    totals = await store.usage.totals(
        start=period.start,
        end=period.end,
        width_seconds=period.width,
        groups={_COLUMNS[each] for each in groups if each in _COLUMNS},
        tenants=tenants,
        models=_texts(request, "models"),
        is_live=is_live,
    )
    return period, totals


def _without_currencies(totals: list[UsageTotal]) -> list[UsageTotal]:
    """Tokens are added up whatever they cost."""
    found: dict[tuple[Any, ...], UsageTotal] = {}
    for each in totals:
        key = (each.bucket, each.tenant, each.model, each.is_live)
        found[key] = found[key].plus(each) if key in found else each
    return list(found.values())


def _usage_result(total: UsageTotal) -> UsageResult:
    return UsageResult(
        input_tokens=total.input_tokens,
        output_tokens=total.output_tokens,
        num_model_requests=total.requests,
        project_id=total.tenant,
        model=total.model,
        batch=None if total.is_live is None else not total.is_live,
        input_cached_tokens=total.cached_tokens,
        input_uncached_tokens=total.input_tokens - total.cached_tokens,
    )


def _texts(request: Request, name: str) -> list[str] | None:
    """A list as the SDKs send it: ``name[]`` from Python and Node, ``name`` from others."""
    query = request.query_params
    found = [*query.getlist(name), *query.getlist(f"{name}[]")]
    return found or None


def _groups(request: Request, known: tuple[str, ...]) -> set[str]:
    return {_one_of("group_by", each, known) for each in _texts(request, "group_by") or ()}


def _one_of(name: str, value: str, known: Any) -> str:
    if value not in known:
        raise _invalid(name, f"'{name}' must be one of {', '.join(known)}.")
    return value


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) > _LATEST:
        raise ApiError(
            400, f"'{name}' must be a time in Unix seconds.", param=name, code="invalid_type"
        )
    return int(text)


def _count(text: str | None, default: int, most: int) -> int:
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise _invalid("limit", f"'limit' must be a number from 1 to {most}.")
    return int(text)


def _page_start(text: str | None, width: int) -> int:
    if not text:
        return 0
    match = re.fullmatch(r"page_([0-9]{1,12})", text)
    if match is None or int(match[1]) % width or int(match[1]) > _LATEST:
        raise _invalid("page", "'page' must be the next_page of the page before.")
    return int(match[1])


def _invalid(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="invalid_value")
