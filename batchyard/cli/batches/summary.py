"""A batch in a few lines for a person: what it is, how far it is, how it ended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from batchyard.batch.facts import facts_of
from batchyard.batch.prices import cost_words
from batchyard.cli.batches.batch_view import error_words, status_words
from batchyard.files.failures import errors_by_code
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs.printable import printable
from batchyard.logs.time_words import duration, moment, relative
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.services.user_locations import places_of
from batchyard.storage.local import LocalStorage
from batchyard.web.url import shown
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_ERRORS_SHOWN = 20
_CODES_SHOWN = 5
_MOST_MESSAGE_CHARS = 200
_HINTS = {
    "model_not_found": "Lines must name the model as it is served: change them, or give the name "
    "that they have, with --served-model-name for an engine that `batchyard run` starts, and with "
    "--model for a server at --engine-url.",
    "invalid_json_line": "The input must be JSONL: one JSON object per line, each a request.",
}


async def describe(services: Services, batch: BatchRecord) -> str:
    """What there is to know of a batch, whether it has ended or not."""
    now = await services.store.database.now()
    if batch.status in TERMINAL:
        head, *rest = (await summarise(services, batch, most_errors=None)).splitlines()
    else:
        head, rest = f"{batch.id} is {status_words(batch)}.", _open_lines(batch, now)
        if failed := await _failed_lines(services, batch):
            rest += ["  errors    of the newest lines:", *failed]
    about = {
        "model": ", ".join(batch.models),
        "endpoint": batch.endpoint,
        "tenant": f"{batch.tenant}, priority {batch.priority}",
        "created": f"{moment(batch.created_at)}, {relative(batch.created_at - now)}",
        "metadata": ", ".join(f"{k}={v}" for k, v in (batch.metadata or {}).items()),
        "retry of": batch.retry_of or "",
    }
    end = ended_at(batch)
    if end is None:
        rest += _warnings(batch)
    else:
        about["ended"] = f"{moment(end)}, after {duration(end - batch.created_at)}"
    return "\n".join([head, *_aligned(about), *rest])


def _open_lines(batch: BatchRecord, now: float) -> list[str]:
    about = {
        "window": f"{batch.completion_window}, ends {relative(batch.expires_at - now)}",
        "requests": facts_of(batch.to_wire()).get("Requests", ""),
        "cost": cost_words(batch),
        "waits": batch.wait_reason or "",
        "done": f"{relative(max(0.0, batch.eta_at - now))}, by forecast" if batch.eta_at else "",
        "flow run": _flow_run(batch.flow_run_id) if batch.flow_run_id else "",
    }
    if batch.eta_at is not None and batch.eta_at > batch.expires_at:
        about["done"] += ": after its window"
    return _aligned(about)


def _flow_run(flow_run_id: str) -> str:
    """Its page in Prefect's UI; only its id where no server is named: then it has no UI."""
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    ui = os.environ.get("PREFECT_UI_URL", api.removesuffix("/api")).rstrip("/")
    return f"{shown(ui)}/runs/flow-run/{flow_run_id}" if ui else flow_run_id


def _aligned(about: Mapping[str, str]) -> list[str]:
    return [f"  {name:<9} {printable(value)}" for name, value in about.items() if value]


async def summarise(
    services: Services, batch: BatchRecord, *, most_errors: int | None = _ERRORS_SHOWN
) -> str:
    """Status, counts, where each file is, and what was wrong with the input.

    A file that is not where the user wanted it is where it is kept. ``most_errors`` None: all.
    """
    facts = facts_of(batch.to_wire())
    lines = [f"{batch.id} {_ended(batch)}."]
    if batch.completed or batch.failed or batch.output_file_id:
        lines += _aligned({"requests": facts["Requests"]})
    lines += await _failed_lines(services, batch)
    lines += _aligned({"": facts.get("Copies", "")})
    lines += _aligned({"tokens": facts.get("Tokens", ""), "cost": cost_words(batch)})
    lines += _aligned({"limited": facts.get("Limited", "")})
    wanted = await places_of(services, batch.id)
    undelivered = batch.undelivered or {}
    for name, kind, file_id, location in (
        ("output", "output", batch.output_file_id, wanted.output),
        ("errors", "error", batch.error_file_id, wanted.error),
    ):
        if file_id is not None:
            place = await _place(services, file_id, None if kind in undelivered else location)
            lines.append(f"  {name:<9} {place}")
    if batch.flow_run_id is not None:
        lines.append(f"  flow run  {_flow_run(batch.flow_run_id)}")
    return "\n".join([*lines, *_warnings(batch), *_errors(batch, most_errors)])


def _warnings(batch: BatchRecord) -> list[str]:
    return [f"  warning   {printable(each.message)}" for each in batch.warnings]


def _ended(batch: BatchRecord) -> str:
    match batch.status:
        case BatchStatus.EXPIRED:
            if batch.completion_window == BACKGROUND_WINDOW:
                return f"expired after {duration(batch.expires_at - batch.created_at)}"
            return f"expired after its completion window of {batch.completion_window}"
        case BatchStatus.FAILED:
            return "failed"
        case status:
            return f"is {status.value}"


async def _failed_lines(services: Services, batch: BatchRecord) -> list[str]:
    """The commonest errors of its lines, with counts, and what one line of each says."""
    groups = await errors_by_code(services, batch)
    lines = []
    for group in groups[:_CODES_SHOWN]:
        message = printable(group.sample)
        if len(message) > _MOST_MESSAGE_CHARS:
            message = f"{message[: _MOST_MESSAGE_CHARS - 1]}…"
        words = f"{group.code}: {message}" if message else group.code
        lines.append(f"            {group.count:,} × {words}")
    if rest := sum(group.count for group in groups[_CODES_SHOWN:]):
        lines.append(f"            {rest:,} with other errors")
    return lines


def _errors(batch: BatchRecord, most: int | None) -> list[str]:
    errors = batch.errors or ()
    lines = [f"  {error_words(error)}" for error in errors[:most]]
    if (hidden := len(errors) - len(lines)) > 0:
        lines.append(f"  and {hidden} more: batchyard show {batch.id}")
    hints = dict.fromkeys(_HINTS[error.code] for error in errors if error.code in _HINTS)
    return lines + [f"  {hint}" for hint in hints]


async def _place(services: Services, file_id: str, location: Location | None) -> str:
    if location is not None:
        return str(location)
    if isinstance(services.storage, LocalStorage):
        key = (await services.store.files.get(file_id)).storage_key
        return str(await services.storage.local_path(key, services.spool))
    return file_id
