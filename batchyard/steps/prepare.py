"""Validates and plans, in one pass over the input: from bytes to chunks that can be leased."""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from batchyard.batch_error import BatchError
from batchyard.errors import InputRefused, ModelNotFound
from batchyard.forecast import OpenWork
from batchyard.lifecycle import BatchStatus
from batchyard.lines import Rules, Validator
from batchyard.logs import event_logger
from batchyard.plan import Planner, PlanSummary
from batchyard.services.batch_span import traced
from batchyard.services.cache_salt import cache_salt_of
from batchyard.services.defects import defects_as_ours
from batchyard.services.keys import file_key, plan_key
from batchyard.services.services import Progress
from batchyard.steps.create import default_quota
from batchyard.steps.forecast import check_window, late_hours
from batchyard.steps.join import with_its_file
from batchyard.steps.known_lengths import known_lengths
from batchyard.steps.offered import check_offered, endpoints_not_served
from batchyard.storage.file import os_errors_as_ours, read_file
from batchyard.store import NewChunk
from batchyard.threads import in_executor, in_thread
from batchyard.turns import BACKGROUND_WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from batchyard.lengths import LengthHistory
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Validated:
    """An input without an error. ``model`` is the one that its lines name.

    ``endpoints``: each that a line names, with the number of the first such line; ``first_line``
    is the number of the first line of all.
    """

    model: str
    requests: int
    size_bytes: int
    first_line: int
    endpoints: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result. ``model`` is the one that the lines name."""

    model: str
    plan: PlanSummary


@traced("batch.plan")
async def prepare_batch(services: Services, batch_id: str) -> Prepared | None:
    """Validate the input, then plan it; None when the batch is past validation already.

    Raises what :class:`Preparation` does.
    """
    async with preparing(services, batch_id) as preparation:
        if preparation is None:
            return None
        await preparation.validate()
        return await preparation.plan()


@asynccontextmanager
async def preparing(services: Services, batch_id: str) -> AsyncIterator[Preparation | None]:
    """The two steps of a batch that is ``validating``; None when it is past that."""
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.VALIDATING:
        yield None
        return
    services.on_progress(Progress(batch_id, "validating"))
    folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="plan-"))
    try:
        yield Preparation(services, batch, folder)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


class Preparation:
    """The input of one batch on its way to chunks. Each step can be repeated after an error."""

    def __init__(self, services: Services, batch: BatchRecord, folder: Path) -> None:
        self._services = services
        self._batch = batch
        self._folder = folder
        self._planner: Planner
        self._validated: Validated
        self._prepared: Prepared | None = None

    async def validate(self) -> Validated:
        """Check every line in one pass over the input, which also sorts the requests.

        Raises :class:`~batchyard.errors.InputRefused` with every (capped) error of the file, and
        for a model or an endpoint that no engine serves.
        """
        key = file_key(self._batch.input_file_id)
        path = await self._services.storage.local_path(key, self._folder)
        with self._errors_explained():
            stopping = threading.Event()
            reading = partial(self._read, path, stopping)
            self._validated = await in_executor(None, reading, interrupt=stopping.set)
        await self._check_served(self._validated)
        return self._validated

    async def _check_served(self, found: Validated) -> None:
        try:
            await check_offered(self._services, found.model)
        except ModelNotFound as error:
            entry = BatchError(error.code, str(error), "body.model", found.first_line)
            raise InputRefused([entry]) from None
        not_served = await endpoints_not_served(self._services, found.endpoints, found.model)
        if not_served:
            entries = [
                BatchError("endpoint_not_served", why, "url", found.endpoints[url])
                for url, why in not_served.items()
            ]
            raise InputRefused(entries)

    async def plan(self) -> Prepared:
        """Store the plan, move the batch to ``in_progress`` with its chunks.

        Raises :class:`~batchyard.errors.QuotaExceeded` and
        :class:`~batchyard.errors.WindowUnattainable`.
        """
        services, batch = self._services, self._batch
        if self._prepared is None:
            model = self._validated.model
            history, secret = await known_lengths(services, batch.tenant, model)
            cache_salt = await cache_salt_of(services, batch.tenant) or ""
            with self._errors_explained():
                write = partial(self._write, history, secret, cache_salt)
                summary = await in_executor(None, write)
            self._prepared = Prepared(self._validated.model, summary)
        prepared = self._prepared
        work = _open_work(batch, prepared)
        await check_window(services, work, batch.completion_window)
        if late := await late_hours(services, work.model, work.deadline):
            log.warning("batch.late_hours", late, batch=batch.id)
        await services.storage.put(plan_key(batch.id), read_file(self._folder / "plan"))
        await services.store.batches.begin(
            batch.id,
            model=prepared.model,
            total=prepared.plan.requests,
            plan_key=plan_key(batch.id),
            chunks=[
                NewChunk(
                    model=prepared.model,
                    first_record=chunk.first_record,
                    request_count=chunk.request_count,
                    token_estimate=chunk.token_estimate,
                    prompt_tokens=chunk.prompt_tokens,
                    prompt_work=chunk.prompt_work,
                    outputs={**chunk.outputs},
                )
                for chunk in prepared.plan.chunks
            ],
            length_classes=prepared.plan.classes.table,
            roots=prepared.plan.roots,
            quota=default_quota(services),
        )
        return prepared

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        with (
            os_errors_as_ours(str(self._services.spool)),
            defects_as_ours("validating and planning the input"),
        ):
            yield

    def _read(self, input_path: Path, stopping: threading.Event) -> Validated:
        """Raises :class:`InterruptedError` once it is ``stopping``."""
        options, settings = self._batch.options, self._services.settings
        validator = Validator(
            Rules(
                endpoint=None if options.mixed_endpoints else self._batch.endpoint,
                models=frozenset(options.models) or None,
                one_model=not options.mixed_models,
                limits=settings.limits.to_limits(of_client=options.public_urls),
                policy=None if options.any_body else settings.bodies.to_policy(),
            )
        )
        self._planner = planner = Planner(
            order=settings.order,
            spool=self._folder,
            chunk_requests=settings.chunk_requests,
            deduplicates=options.deduplicate,
        )
        requests = 0
        endpoints: dict[str, int] = {}
        with input_path.open("rb") as file:
            for line in validator.lines(file):
                if stopping.is_set():
                    raise InterruptedError
                if not validator.has_errors:
                    planner.add(line)
                requests += 1
                if line.url not in endpoints:
                    endpoints[line.url] = line.number
            self._finish(validator, file)
        assert validator.model is not None  # noqa: S101 - every valid line names one
        size_bytes = input_path.stat().st_size
        first_line = min(endpoints.values())
        return Validated(validator.model, requests, size_bytes, first_line, endpoints)

    def _finish(self, validator: Validator, file: BinaryIO) -> None:
        try:
            validator.finish(file)
        except InputRefused as refused:
            parts = self._batch.options.parts
            raise InputRefused([with_its_file(each, parts) for each in refused.entries]) from None

    def _write(self, history: LengthHistory, secret: bytes, cache_salt: str) -> PlanSummary:
        with (self._folder / "plan").open("wb") as plan_file:
            return self._planner.write(plan_file, history, secret, cache_salt=cache_salt)


def _open_work(batch: BatchRecord, prepared: Prepared) -> OpenWork:
    chunks = prepared.plan.chunks
    return OpenWork(
        batch.id,
        prepared.model,
        batch.tenant,
        batch.expires_at,
        batch.priority,
        batch.created_at,
        remaining_tokens=sum(chunk.token_estimate for chunk in chunks),
        remaining_work=prepared.plan.output_tokens + sum(chunk.prompt_work for chunk in chunks),
        is_background=batch.completion_window == BACKGROUND_WINDOW,
    )
