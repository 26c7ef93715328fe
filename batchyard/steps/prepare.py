"""Validates and plans, in one pass over the input: from bytes to chunks that can be leased."""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.forecast import OpenWork
from batchyard.lifecycle import BatchStatus
from batchyard.lines import Rules, Validator
from batchyard.plan import Planner, PlanSummary
from batchyard.services.batch_span import traced
from batchyard.services.defects import defects_as_ours
from batchyard.services.keys import file_key, plan_key
from batchyard.services.services import Progress
from batchyard.steps.create import default_quota
from batchyard.steps.forecast import check_window
from batchyard.steps.offered import check_offered
from batchyard.storage.file import os_errors_as_ours, read_file
from batchyard.store import NewChunk
from batchyard.threads import in_executor, in_thread

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result. ``model`` is the one that the lines name."""

    model: str
    plan: PlanSummary


@traced("batch.plan")
async def prepare_batch(services: Services, batch_id: str) -> Prepared | None:
    """Validate the input, store the plan, move the batch to ``in_progress`` with its chunks.

    None when the batch is past validation already. Raises
    :class:`~batchyard.errors.InputRefused` with every (capped) error of the file,
    :class:`~batchyard.errors.ModelNotFound`, :class:`~batchyard.errors.QuotaExceeded` and
    :class:`~batchyard.errors.WindowUnattainable`.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.VALIDATING:
        return None
    services.on_progress(Progress(batch_id, "validating"))
    folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="plan-"))
    try:
        input_path = await services.storage.local_path(file_key(batch.input_file_id), folder)
        with (
            os_errors_as_ours(str(services.spool)),
            defects_as_ours("validating and planning the input"),
        ):
            stopping = threading.Event()
            preparing = partial(_prepare, services, batch, input_path, folder, stopping)
            prepared = await in_executor(None, preparing, interrupt=stopping.set)
        await check_offered(services, prepared.model)
        await check_window(services, _open_work(batch, prepared), batch.completion_window)
        await services.storage.put(plan_key(batch_id), read_file(folder / "plan"))
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)
    await services.store.batches.begin(
        batch_id,
        model=prepared.model,
        total=prepared.plan.requests,
        plan_key=plan_key(batch_id),
        chunks=[
            NewChunk(
                model=prepared.model,
                first_record=chunk.first_record,
                request_count=chunk.request_count,
                token_estimate=chunk.token_estimate,
            )
            for chunk in prepared.plan.chunks
        ],
        quota=default_quota(services),
    )
    return prepared


def _prepare(
    services: Services,
    batch: BatchRecord,
    input_path: Path,
    folder: Path,
    stopping: threading.Event,
) -> Prepared:
    """Raises :class:`InterruptedError` once it is ``stopping``."""
    options, settings = batch.options, services.settings
    validator = Validator(
        Rules(
            endpoint=None if options.mixed_endpoints else batch.endpoint,
            models=frozenset(options.models) or None,
            one_model=not options.mixed_models,
            limits=settings.limits.to_limits(),
            policy=None if options.any_body else settings.bodies.to_policy(),
        )
    )
    planner = Planner(
        order=settings.order,
        spool=folder,
        chunk_requests=settings.chunk_requests,
        deduplicates=options.deduplicate,
    )
    with input_path.open("rb") as file:
        for line in validator.lines(file):
            if stopping.is_set():
                raise InterruptedError
            if not validator.has_errors:
                planner.add(line)
        validator.finish(file)
    with (folder / "plan").open("wb") as plan_file:
        summary = planner.write(plan_file)
    assert validator.model is not None  # noqa: S101 - every valid line names one
    return Prepared(validator.model, summary)


def _open_work(batch: BatchRecord, prepared: Prepared) -> OpenWork:
    return OpenWork(
        batch.id,
        prepared.model,
        batch.tenant,
        batch.expires_at,
        batch.priority,
        batch.created_at,
        remaining_tokens=sum(chunk.token_estimate for chunk in prepared.plan.chunks),
    )
