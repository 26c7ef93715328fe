"""How a batch ended, in a few lines for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.steps.keys import file_key
from batchyard.storage.local import LocalStorage
from batchyard.storage.location import parse_location

if TYPE_CHECKING:
    from batchyard.steps.services import Services
    from batchyard.store import BatchRecord

_ERRORS_SHOWN = 20


async def summarise(services: Services, batch: BatchRecord) -> str:
    """Status, counts, where each file is, and what was wrong with the input."""
    counts, usage = batch.counts, batch.usage
    lines = [f"{batch.id} is {batch.status.value}."]
    if counts.total:
        lines.append(
            f"  requests  {counts.completed:,} succeeded, {counts.failed:,} failed, "
            f"{counts.total:,} in all"
        )
    if usage.total_tokens:
        lines.append(
            f"  tokens    {usage.input_tokens:,} in "
            f"({usage.input_tokens_details.cached_tokens:,} from cache), "
            f"{usage.output_tokens:,} out"
        )
    wanted = await services.store.batches.locations(batch.id)
    for name, file_id, location in (
        ("output", batch.output_file_id, wanted.output),
        ("errors", batch.error_file_id, wanted.error),
    ):
        if file_id is not None:
            lines.append(f"  {name:<9} {await _place(services, file_id, location)}")
    if batch.flow_run_id is not None:
        lines.append(f"  flow run  {batch.flow_run_id}")
    for error in (batch.errors or ())[:_ERRORS_SHOWN]:
        where = f"line {error.line}: " if error.line is not None else ""
        lines.append(f"  {where}{error.code}: {error.message}")
    hidden = len(batch.errors or ()) - _ERRORS_SHOWN
    if hidden > 0:
        lines.append(f"  and {hidden} more: batchyard show {batch.id}")
    return "\n".join(lines)


async def _place(services: Services, file_id: str, location: str | None) -> str:
    if location is not None:
        return str(parse_location(location))
    if isinstance(services.storage, LocalStorage):
        return str(await services.storage.local_path(file_key(file_id), services.spool))
    return file_id
