"""Validates and plans, in one pass over the input: from bytes to chunks that can be leased."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.batch.batch_options import OnInvalid
from batchyard.batch_error import BatchError
from batchyard.errors import DispatchFailed, InputRefused, LeaseLost, ModelNotFound, QueueFull
from batchyard.lifecycle import BatchStatus
from batchyard.lines.earlier import MOST_EARLIER_BYTES
from batchyard.lines.rules import Rules
from batchyard.logs import event_logger
from batchyard.plan.lengths import PROMPT_WORK, LengthHistory
from batchyard.processes.threads import in_thread
from batchyard.schedule.forecast import OpenWork
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.services.batch_span import batch_span
from batchyard.services.cache_salt import cache_salt_of
from batchyard.services.defects import defects_as_ours
from batchyard.services.keys import file_key, plan_key
from batchyard.services.quotas import default_quota
from batchyard.services.services import Progress
from batchyard.steps.create.offered import check_offered, endpoints_not_served
from batchyard.steps.forecast.forecast import check_window, late_hours
from batchyard.steps.forecast.known_lengths import known_lengths
from batchyard.steps.prepare.deep_validation import (
    find_counter,
    findings_words,
    first_good_model,
    first_model,
    is_deep,
)
from batchyard.steps.prepare.input_reader import Check, ReadingJob, WritePlan
from batchyard.steps.prepare.reader_process import input_reader
from batchyard.storage.file import os_errors_as_ours, read_file
from batchyard.store import NewChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.lines.offer import Offer
    from batchyard.plan.planner import PlanSummary
    from batchyard.services.services import Services
    from batchyard.steps.prepare.deep_validation import DeepFindings, NoCounter
    from batchyard.steps.prepare.input_reader import Validated
    from batchyard.steps.prepare.reader_process import Reader
    from batchyard.store import BatchRecord

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result. ``model`` is the one that the lines name."""

    model: str | None
    plan: PlanSummary


@asynccontextmanager
async def preparing(
    services: Services, batch_id: str, epoch: int
) -> AsyncIterator[Preparation | None]:
    """The two steps of a batch that is ``validating``; None when it is past that.

    ``epoch`` is that of the batch's lease.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.VALIDATING:
        yield None
        return
    services.on_progress(Progress(batch_id, "validating"))
    folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="plan-"))
    try:
        async with batch_span(services, "batch.plan", batch_id), AsyncExitStack() as opened:
            yield Preparation(services, batch, epoch, folder, opened)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


class Preparation:
    """The input of one batch on its way to chunks. Each step can be repeated after an error.

    What reads it lives as long as what is ``opened``.
    """

    def __init__(
        self,
        services: Services,
        batch: BatchRecord,
        epoch: int,
        folder: Path,
        opened: AsyncExitStack,
    ) -> None:
        self._services = services
        self._batch = batch
        self._epoch = epoch
        self._plan_key = plan_key(batch.id, epoch)
        self._folder = folder
        self._opened = opened
        self._reader: Reader | None = None
        self._validated: Validated
        self._prepared: Prepared | None = None
        self._is_attainable = False

    async def validate(self) -> Validated:
        """Check every line in one pass over the input, which also sorts the requests.

        Bad lines are left out where the batch asks for it. Raises
        :class:`~batchyard.errors.InputRefused` with every (capped) error of the file otherwise,
        and for a model or an endpoint that no engine serves. Raises
        :class:`~batchyard.errors.DispatchFailed` where it depends on the adapters that there are,
        and Prefect does not say.
        """
        key = file_key(self._batch.input_file_id)
        path = await self._services.storage.local_path(key, self._folder)
        offer = await self._services.find_offer(())
        counter = await self._find_counter(path, offer)
        if self._reader is None:
            self._reader = await self._open_reader(path)
        self._validated = await self._check_lines(self._reader, offer, counter)
        if names := await self._doubtful(offer):
            newer = await self._services.find_offer(names)
            if not newer.is_known:
                # Without the names, which are the client's words: this goes to logs.
                raise DispatchFailed(
                    "Prefect does not say whether lines name models or adapters that do not exist."
                )
            if newer != offer:
                counter = await self._find_counter(path, newer)
                self._validated = await self._check_lines(self._reader, newer, counter)
        if self._validated.refusal:
            raise InputRefused(self._validated.refusal)
        if self._validated.model is not None:
            await self._check_served(self._validated.model, self._validated.endpoints)
        return self._validated

    async def _find_counter(self, path: Path, offer: Offer) -> CounterProgram | NoCounter | None:
        """What counts the prompts of a deep validation, or why nothing does; None: it is basic."""
        if not is_deep(self._services, self._batch):
            return None
        with self._errors_explained():
            model = await in_thread(self._model_to_count, path, offer)
        return await find_counter(self._services.engine_for, model)

    def _model_to_count(self, path: Path, offer: Offer) -> str | None:
        options = self._batch.options
        if options.models:
            return offer.model_of(options.models[0])
        if self._leaves_out or options.merges:
            return first_good_model(path, self._rules(offer))
        named = first_model(path, self._services.settings.limits.max_line_bytes)
        return None if named is None else offer.model_of(named)

    async def _open_reader(self, path: Path) -> Reader:
        with self._errors_explained():
            reader = input_reader(self._job(path), self._batch.tenant)
            return await self._opened.enter_async_context(reader)

    async def _check_lines(
        self, reader: Reader, offer: Offer, counter: CounterProgram | NoCounter | None
    ) -> Validated:
        with self._errors_explained():
            validated = await reader.check(Check(self._rules(offer), counter))
        if validated.deep is not None:
            self._log_findings(validated.deep)
        return validated

    async def _doubtful(self, offer: Offer) -> list[str]:
        """Names in the lines that may be those of adapters of which is not known yet."""
        names, model = set(self._validated.strays), self._validated.model
        if model is not None and not (offer.is_known and offer.has(model)):
            # One that was served before is a model. Its batches go on while Prefect is away.
            is_model = await self._services.store.rates.knows(model)
            names |= set() if is_model else {model}
        return sorted(names)

    async def _check_served(self, model: str, endpoints: Mapping[str, int]) -> None:
        try:
            await check_offered(self._services, model)
        except ModelNotFound as error:
            first_line = min(endpoints.values())
            entry = BatchError(error.code, str(error), "body.model", first_line)
            raise InputRefused([entry]) from None
        not_served = await endpoints_not_served(self._services, endpoints, model)
        if not_served:
            entries = [
                BatchError("endpoint_not_served", why, "url", endpoints[url])
                for url, why in not_served.items()
            ]
            raise InputRefused(entries)

    async def plan(self) -> Prepared:
        """Store the plan, move the batch to ``in_progress`` with its chunks.

        Raises :class:`~batchyard.errors.QuotaExceeded`,
        :class:`~batchyard.errors.WindowUnattainable` and :class:`~batchyard.errors.LeaseLost`, and
        :class:`~batchyard.errors.QueueFull` where the batch waits for room in its tenant's quota.
        """
        services, batch = self._services, self._batch
        validated = self._validated
        if self._prepared is None:
            self._prepared = Prepared(validated.model, await self._write_plan(validated.model))
        prepared = self._prepared
        if validated.model is not None and not self._is_attainable:
            await self._check_window(validated.model, prepared.plan)
            # Once: if only the answer is lost below, the batch is among what waits already.
            self._is_attainable = True
        await services.storage.put(self._plan_key, read_file(self._folder / "plan"))
        if validated.left_out is not None:
            await self._check_lease()
            await validated.left_out.store(services, batch.id)
        try:
            await self._begin(prepared)
        except QueueFull:
            await services.store.queue_room.record(
                batch.id,
                requests=validated.requests - validated.refused - batch.options.kept.requests,
                tokens=sum(chunk.token_estimate for chunk in prepared.plan.chunks),
                epoch=self._epoch,
            )
            raise
        return prepared

    async def _begin(self, prepared: Prepared) -> None:
        services, validated = self._services, self._validated
        await services.store.batches.begin(
            self._batch.id,
            model=prepared.model,
            adapters=validated.adapters,
            fields=validated.fields,
            total=validated.requests,
            plan_key=self._plan_key,
            chunks=_new_chunks(prepared),
            length_classes=prepared.plan.classes.table,
            roots=prepared.plan.roots,
            refused=validated.refused,
            quota=default_quota(services),
        )

    async def _write_plan(self, model: str | None) -> PlanSummary:
        if model is None:
            history, secret = LengthHistory(), b""
        else:
            history, secret = await known_lengths(self._services, self._batch.tenant, model)
        cache_salt = await cache_salt_of(self._services, self._batch.tenant) or ""
        with self._errors_explained():
            assert self._reader is not None  # noqa: S101 - it has checked
            plan = await self._reader.write_plan(WritePlan(history, secret, cache_salt))
            # The next large input need not wait until this plan is stored.
            await self._opened.aclose()
        return plan

    async def _check_lease(self) -> None:
        """Raise LeaseLost where another owner has the batch: its bad lines may be other ones.

        Their keys have no epoch, as readers of segments take all that there are.
        """
        snapshots = await self._services.store.batch_leases.snapshots([self._batch.id])
        if (now := snapshots.get(self._batch.id)) is None or now.epoch != self._epoch:
            raise LeaseLost(f"{self._batch.id} has another owner; drop what is left of it.")

    async def _check_window(self, model: str, plan: PlanSummary) -> None:
        services, batch = self._services, self._batch
        work = _open_work(batch, model, plan)
        if not batch.is_hidden:
            # What its tenant does not see was accepted before.
            await check_window(services, work, batch.completion_window)
        if late := await late_hours(services, work.model, work.deadline):
            log.warning("batch.late_hours", late, batch=batch.id)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        with (
            os_errors_as_ours(str(self._services.spool)),
            defects_as_ours("validating and planning the input"),
        ):
            yield

    @property
    def _leaves_out(self) -> bool:
        return self._batch.options.on_invalid is not OnInvalid.FAIL

    def _job(self, input_path: Path) -> ReadingJob:
        options, settings = self._batch.options, self._services.settings
        return ReadingJob(
            batch_id=self._batch.id,
            input_path=input_path,
            folder=self._folder,
            parts=options.parts,
            leaves_out=self._leaves_out,
            order=settings.order,
            chunk_requests=settings.chunk_requests,
            deduplicates=options.deduplicate,
        )

    def _rules(self, offer: Offer) -> Rules:
        options, settings = self._batch.options, self._services.settings
        limits = settings.limits.to_limits(of_client=options.public_urls)
        if options.merges:
            # What a retry adds to lines must not make one too long.
            limits = replace(limits, max_line_bytes=limits.max_line_bytes + MOST_EARLIER_BYTES)
        return Rules(
            endpoint=None if options.mixed_endpoints else self._batch.endpoint,
            models=frozenset(options.models) or None,
            one_model=not options.mixed_models,
            offer=offer,
            limits=limits,
            policy=None if options.any_body else settings.bodies.to_policy(),
            is_rendered=options.is_rendered,
            merges=options.merges,
        )

    def _log_findings(self, findings: DeepFindings) -> None:
        words = findings_words(findings)
        if findings.why_not:
            log.warning("batch.not_counted", words, batch=self._batch.id)
        elif words:
            log.info("batch.counted", words, batch=self._batch.id)


def _new_chunks(prepared: Prepared) -> list[NewChunk]:
    return [
        NewChunk(
            model=str(prepared.model),
            first_record=chunk.first_record,
            request_count=chunk.request_count,
            token_estimate=chunk.token_estimate,
            prompt_tokens=chunk.prompt_tokens,
            prompt_work=chunk.prompt_work,
            outputs={**chunk.outputs},
        )
        for chunk in prepared.plan.chunks
    ]


def _open_work(batch: BatchRecord, model: str, plan: PlanSummary) -> OpenWork:
    return OpenWork(
        batch.id,
        model,
        batch.tenant,
        batch.expires_at,
        batch.priority,
        batch.created_at,
        remaining_tokens=sum(chunk.token_estimate for chunk in plan.chunks),
        remaining_work=plan.output_tokens + plan.prompt_work,
        remaining_prompts=plan.prompt_work / PROMPT_WORK,
        is_background=batch.completion_window == BACKGROUND_WINDOW,
    )
