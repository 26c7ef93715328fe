"""The page of one batch: all that is known of it, as text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batchyard.batch.facts import facts_of, token_words
from batchyard.batch.prices import cost_words
from batchyard.errors import RecordNotFound
from batchyard.files.failures import Findings, find
from batchyard.lifecycle import STOPPABLE, TERMINAL
from batchyard.logs.time_words import moment
from batchyard.page.batch_rows import BatchRow, row_of
from batchyard.page.charts import Charts, charts_of
from batchyard.page.words import (
    clock_time,
    compact,
    count,
    name_of,
    short_duration,
    size,
)
from batchyard.store import DeliveryStatus
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, DeliveryRecord
    from batchyard.store.overview import ListedBatch

_MOST_DELIVERIES: Final = 50
_CURL: Final = 'curl -H "Authorization: Bearer $OPENAI_API_KEY"'
_SHOWN_ELSEWHERE: Final = {
    *("Created", "Ended", "Duration", "Requests", "Failed with", "Tokens", "Model"),
    *("Results", "Errors"),
}
"""The batch's facts that this page does not list, because another part of it has them."""
_MOMENTS: Final = (
    ("created_at", "created"),
    ("in_progress_at", "planned, lines may run"),
    ("cancelling_at", "cancelled by request"),
    ("finalizing_at", "last line answered, files are written"),
    ("completed_at", "completed"),
    ("failed_at", "failed"),
    ("expired_at", "expired"),
    ("cancelled_at", "cancelled"),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the batch's life. ``after`` is the time since the one before; empty: the first."""

    label: str
    clock: str
    exact: str
    after: str


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One of the batch's files. ``url`` None: it was deleted, or is not fetched yet."""

    label: str
    name: str
    detail: str
    url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """A notification or a result file; ``can_replay``: it has ended, and may be sent again."""

    id: str
    what: str
    to: str
    look: str
    status: str
    detail: str
    can_replay: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """What the template shows. What cannot be done with the batch now has no button."""

    row: BatchRow
    has_ended: bool
    facts: list[tuple[str, str]]
    metadata: list[tuple[str, str]]
    moments: list[Moment]
    charts: Charts | None
    findings: Findings
    files: list[ResultFile]
    deliveries: list[DeliveryRow]
    snippets: list[tuple[str, str]]
    running: str
    is_paused: bool
    can_steer: bool
    can_retry: bool
    priority: int


async def batch_page(
    services: Services, batch_id: str, tenant: str | None, base_url: str
) -> BatchPage | None:
    """The page; None: there is no such batch of this tenant."""
    store = services.store
    listed = await store.overview.batch(batch_id, tenant)
    if listed is None:
        return None
    batch = listed.batch
    now = await store.database.now()
    points = await store.batch_history.of(batch_id)
    deliveries = await store.deliveries.page(batch_id=batch_id, limit=_MOST_DELIVERIES)
    row = row_of(listed, now, with_tenant=True)
    return BatchPage(
        row=row,
        has_ended=batch.status in TERMINAL,
        facts=_facts(listed),
        metadata=_metadata(batch),
        moments=_moments(batch, now),
        charts=charts_of(listed, points, now, ended_at(batch)),
        findings=await find(services, batch),
        files=[each for each in await _files(services, batch) if each is not None],
        deliveries=[_delivery(each, now) for each in deliveries],
        snippets=_snippets(batch, base_url),
        running=count(listed.running) if listed.running else "",
        is_paused=batch.paused_at is not None,
        can_steer=batch.status in STOPPABLE,
        can_retry=batch.status in TERMINAL
        and batch.in_progress_at is not None
        and (batch.error_file_id is not None or batch.output_file_id is None),
        priority=batch.priority,
    )


def _facts(listed: ListedBatch) -> list[tuple[str, str]]:
    batch = listed.batch
    known = facts_of(batch.to_wire())
    tokens = token_words(listed.input_tokens, listed.cached_tokens, listed.output_tokens)
    estimate = f"about {compact(batch.token_estimate)} by the plan" if batch.token_estimate else ""
    facts = {
        "Batch": batch.id,
        "Tenant": batch.tenant,
        "Endpoint": batch.endpoint,
        "Tokens": tokens or estimate,
        "Cost": cost_words(batch),
        **{name: text for name, text in known.items() if name not in _SHOWN_ELSEWHERE},
        "Retry of": batch.retry_of or "",
        "Flow run": batch.flow_run_id or "",
    }
    warnings = [("Warning", each.message) for each in batch.warnings]
    return [(name, text) for name, text in facts.items() if text] + warnings


def _metadata(batch: BatchRecord) -> list[tuple[str, str]]:
    name = name_of(batch)
    return [(key, value) for key, value in (batch.metadata or {}).items() if value != name]


def _moments(batch: BatchRecord, now: float) -> list[Moment]:
    times = sorted(
        (time, order, label)
        for order, (column, label) in enumerate(_MOMENTS)
        if (time := getattr(batch, column)) is not None
    )
    before = [None, *(time for time, _, _ in times)]
    return [
        Moment(
            label,
            clock_time(time, now),
            moment(time),
            "" if earlier is None else f"+ {short_duration(time - earlier)}",
        )
        for (time, _, label), earlier in zip(times, before, strict=False)
    ]


async def _files(services: Services, batch: BatchRecord) -> list[ResultFile | None]:
    ids = {
        "input": batch.input_file_id,
        "output": batch.output_file_id,
        "error": batch.error_file_id,
    }
    return [await _file(services, batch, kind, file_id) for kind, file_id in ids.items()]


async def _file(
    services: Services, batch: BatchRecord, kind: str, file_id: str | None
) -> ResultFile | None:
    label = {"input": "Input", "output": "Answers", "error": "Failed lines"}[kind]
    if file_id is None:
        return None
    try:
        file = await services.store.files.get(file_id)
    except RecordNotFound:
        return ResultFile(label, file_id, "not in the store", None)
    detail = size(file.size_bytes)
    if missing := (batch.undelivered or {}).get(kind):
        detail += f"; not delivered: {missing}"
    return ResultFile(label, file.filename, detail, f"/batches/{batch.id}/files/{kind}")


def _delivery(delivery: DeliveryRecord, now: float) -> DeliveryRow:
    is_pending = delivery.status is DeliveryStatus.PENDING
    tries = "1 attempt" if delivery.attempts == 1 else f"{delivery.attempts} attempts"
    detail = tries
    if is_pending:
        wait = delivery.due_at - now
        when = f"in {short_duration(wait)}" if wait > 0 else "now"
        detail = f"{tries}, next {when}"
    elif delivery.ended_at is not None:
        detail = f"{tries}, {clock_time(delivery.ended_at, now)}"
    look = {DeliveryStatus.PENDING: "waiting", DeliveryStatus.DELIVERED: "completed"}
    return DeliveryRow(
        id=delivery.id,
        what=f"{delivery.kind.value}, {delivery.event_type}",
        to=delivery.recipient or delivery.destination,
        look=look.get(delivery.status, "failed"),
        status=delivery.status.value.replace("_", " "),
        detail=detail,
        can_replay=not is_pending,
    )


def _snippets(batch: BatchRecord, base_url: str) -> list[tuple[str, str]]:
    """How to get at it from elsewhere, without a key: name and text of each.

    ``base_url`` is where this page was loaded from.
    """
    url = f"{base_url}/v1"
    has_output = batch.output_file_id is not None
    curl = f"{_CURL} \\\n{shlex.quote(f'{url}/batches/{batch.id}')}"
    python = [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{url}")  # and OPENAI_API_KEY',
        f'batch = client.batches.retrieve("{batch.id}")',
    ]
    command = f"batchyard watch {batch.id}"
    if has_output:
        file = f"{url}/files/{batch.output_file_id}/content"
        curl = f"{_CURL} -o results.jsonl \\\n{shlex.quote(file)}"
        python.append("client.files.content(batch.output_file_id).write_to_file('results.jsonl')")
        command = f"batchyard results {batch.id} -o results.jsonl"
    return [("curl", curl), ("Python", "\n".join(python)), ("CLI", command)]
