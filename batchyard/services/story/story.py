"""The story of a batch in log lines: what happened to it, in the words of its lifecycle.

Each line begins with an event that stays the same, and names the batch; what follows is for
people. The lines are in the log of the batch's flow run. No prompt, answer or URL query is in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal

from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.plan.planner import PlanSummary
    from batchyard.store import BatchRecord, ChunkSummary

log = event_logger(__name__)


def began(batch: BatchRecord, page: str | None) -> None:
    """Its flow run has the batch from here on."""
    model = ", ".join(batch.models) or "(named in the input)"
    log.info(
        "batch.began",
        page or "",
        batch=batch.id,
        tenant=batch.tenant,
        model=model,
        status=batch.status.value,
    )


def fetched(batch_id: str, size_bytes: int) -> None:
    """The input is in the object store."""
    log.info("batch.fetched", decimal(size_bytes), batch=batch_id)


def validated(
    batch_id: str, requests: int, size_bytes: int, model: str | None, refused: int = 0
) -> None:
    """Every line is a request, or was left out because it is bad."""
    text = f"{requests:,} lines{_bad_words(refused)}, {decimal(size_bytes)}"
    log.info("batch.validated", text, batch=batch_id, model=model or "")


def validated_words(requests: int, model: str | None, refused: int) -> str:
    """``12 lines, 2 of them bad and left out, for the model m``."""
    of_model = f", for the model {model}" if model else ""
    return f"{requests:,} lines{_bad_words(refused)}{of_model}"


def _bad_words(refused: int) -> str:
    return f", {refused:,} of them bad and left out" if refused else ""


def planned(batch_id: str, plan: PlanSummary) -> None:
    """The requests are in chunks."""
    log.info("batch.planned", plan_words(plan), batch=batch_id)


def waiting(batch_id: str, reason: str) -> None:
    """No runner has a chunk of the batch."""
    log.info("batch.waiting", reason, batch=batch_id)


def warned(batch_id: str, message: str) -> None:
    """Its owner may have to do something, or its files will not get where they are wanted."""
    log.warning("batch.warned", message, batch=batch_id)


def running(batch_id: str, places: Iterable[str]) -> None:
    """Runners have chunks of the batch."""
    log.info("batch.running", ", ".join(places), batch=batch_id)


def progressed(batch_id: str, total: int, chunks: ChunkSummary) -> None:
    """A further chunk is done."""
    log.info("batch.progress", progress_words(total, chunks), batch=batch_id)


def collected(batch_id: str, text: str) -> None:
    """The result files are in the object store."""
    log.info("batch.collected", text, batch=batch_id)


def uploaded(batch_id: str, text: str) -> None:
    """The result files are where they were asked for, or this says why not."""
    log.info("batch.uploaded", text, batch=batch_id)


def notified(batch_id: str, flow_run_id: str, text: str) -> None:
    """An attempt to send a webhook or an e-mail. The line is for another flow run's log."""
    log.info("batch.notified", text, for_flow_run=flow_run_id, batch=batch_id)


def plan_words(plan: PlanSummary) -> str:
    """``6,000 requests in 6 chunks, 4,102 of about 90,000 prompt tokens shared``."""
    copies = f", {plan.copies:,} of them identical to another one" if plan.copies else ""
    return (
        f"{plan.requests:,} requests{copies} in {_count(len(plan.chunks), 'chunk')}, "
        f"{plan.shared_tokens:,} of about {plan.prompt_tokens:,} prompt tokens shared"
    )


def progress_words(total: int, chunks: ChunkSummary) -> str:
    """``chunk 3 of 12 done, 3,072 of 12,000 requests answered``."""
    answered = chunks.completed + chunks.failed
    count = chunks.pending + chunks.leased + chunks.done
    return f"chunk {chunks.done:,} of {count:,} done, {answered:,} of {total:,} requests answered"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
