"""The report of a batch at its end, as an artifact in Prefect, and its end as a value for flows.

No prompt, answer, URL query or key is in either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.batch.facts import facts_of
from batchyard.batch.prices import cost_words
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.logs.time_words import duration
from batchyard.services.user_locations import places_of
from flows.shown.artifacts import create_artifact
from flows.shown.plot import speed_plot

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from flows.shown.run_history import RunHistory

log = event_logger(__name__)

_AMONG_FILES: Final = {"Results", "Errors"}
"""Facts that the table of files has."""


async def report_batch(services: Services, batch: BatchRecord, history: RunHistory) -> None:
    """The batch as a Markdown artifact, keyed by its id. Raises nothing."""
    try:
        await create_artifact(
            kind="markdown",
            key=batch.id.replace("_", "-"),
            data=await _report(services, batch, history),
            description=_headline(batch),
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the batch has its end
        log.warning("report.not_shown", describe(error), batch=batch.id)


def _headline(batch: BatchRecord) -> str:
    counts = batch.counts
    if not counts.total:
        return batch.status.value
    return f"{batch.status.value}: {counts.completed:,} of {counts.total:,} requests succeeded"


async def _report(services: Services, batch: BatchRecord, history: RunHistory) -> str:
    # Codes and counts only: an engine's message may quote a prompt.
    facts = facts_of(batch.to_wire(), batch.options.error_counts)
    rows = [(name, _cell(text)) for name, text in facts.items() if name not in _AMONG_FILES]
    rows += [*_cost(batch), *_speed(batch, history)]
    page = services.settings.page_of(batch.id)
    name = f"[{batch.id}]({page})" if page else batch.id
    lines = [f"# {_headline(batch).capitalize()}", ""]
    lines += [f"| Batch | {name} |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows)]
    if plot := speed_plot(history.rates()):
        lines += ["", "## Speed", "", plot]
    if batch.undelivered:
        texts = batch.undelivered.values()
        lines += ["", "## Not written", "", *(f"- {_cell(text)}" for text in texts)]
    if batch.errors:
        lines += ["", "## Errors", "", "| Line | Code | Message |", "|---|---|---|"]
        lines += [f"| {e.line or '–'} | {e.code} | {_cell(e.message)} |" for e in batch.errors]
    lines += ["", "## Files", "", "| File | Id | Where |", "|---|---|---|"]
    return "\n".join([*lines, *await _files(services, batch)])


def _cost(batch: BatchRecord) -> list[tuple[str, str]]:
    cost = cost_words(batch)
    return [("Cost", cost)] if cost else []


def _speed(batch: BatchRecord, history: RunHistory) -> list[tuple[str, str]]:
    """The time with an engine, and the speed in it. Waiting makes no batch slow."""
    if batch.in_progress_at is None:
        return []
    speed = history.overall()
    if speed is None:
        return [("Time with an engine", "none")] if batch.counts.completed == 0 else []
    busy_from, ended = history.busy_from or 0.0, history.ended or 0.0
    return [
        ("Time waiting for an engine", duration(busy_from)),
        ("Time running", _seconds(ended - busy_from)),
        ("Requests per second", _rate_words(speed.requests_per_second)),
        ("Output tokens per second", _rate_words(speed.output_tokens_per_second)),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _rate_words(rate: float) -> str:
    """A slow batch has a speed too: 0.0013 per second, and never 0.0 where there was an answer."""
    return f"{rate:,.1f}" if rate >= 1 or rate == 0 else f"{rate:.2g}"


async def _files(services: Services, batch: BatchRecord) -> list[str]:
    wanted = await places_of(services, batch.id)
    rows = []
    for name, file_id, location in (
        ("Input", batch.input_file_id, wanted.input),
        ("Output", batch.output_file_id, wanted.output),
        ("Errors", batch.error_file_id, wanted.error),
    ):
        if file_id is not None:
            # As text, a location leaves out what makes a presigned URL a secret.
            where = _cell(str(location)) if location else "Batchyard's store"
            rows.append(f"| {name} | {file_id} | {where} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
