"""How a batch ended, in a few lines for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.lifecycle import BatchStatus
from batchyard.services.places import places_of
from batchyard.storage.local import LocalStorage

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.storage.access import Location
    from batchyard.store import BatchRecord

_ERRORS_SHOWN = 20
_HINTS = {
    "model_not_found": "Lines must name the model as it is served: give the name that they have "
    "with --served-model-name, or change the lines.",
    "invalid_json_line": "The input must be JSONL: one JSON object per line, each a request.",
}


async def summarise(services: Services, batch: BatchRecord) -> str:
    """Status, counts, where each file is, and what was wrong with the input.

    A file that is not where the user wanted it is where it is kept.
    """
    counts, usage = batch.counts, batch.usage
    lines = [f"{batch.id} {_ended(batch)}."]
    if counts.completed or counts.failed or batch.output_file_id:
        lines.append(
            f"  requests  {counts.completed:,} succeeded, {counts.failed:,} failed, "
            f"{counts.total:,} in all"
        )
    if batch.deduplicated_requests:
        lines.append(
            f"            {batch.deduplicated_requests:,} with the answer of an identical request"
        )
    if usage.total_tokens:
        lines.append(
            f"  tokens    {usage.input_tokens:,} in "
            f"({usage.input_tokens_details.cached_tokens:,} from cache), "
            f"{usage.output_tokens:,} out"
        )
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
        lines.append(f"  flow run  {batch.flow_run_id}")
    return "\n".join([*lines, *_errors(batch)])


def _ended(batch: BatchRecord) -> str:
    match batch.status:
        case BatchStatus.EXPIRED:
            return f"expired after its completion window of {batch.completion_window}"
        case BatchStatus.FAILED:
            return "failed"
        case status:
            return f"is {status.value}"


def _errors(batch: BatchRecord) -> list[str]:
    errors = batch.errors or ()
    lines = []
    for error in errors[:_ERRORS_SHOWN]:
        where = f"line {error.line}: " if error.line is not None else ""
        lines.append(f"  {where}{error.code}: {error.message}")
    hidden = len(errors) - _ERRORS_SHOWN
    if hidden > 0:
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
