"""Retry: a new batch of lines of one that has ended, as they were or with other parameters."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batchyard.errors import (
    IdempotencyConflict,
    ObjectNotFound,
    RecordNotFound,
    RequestRefused,
)
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.lines.body_patch import NO_PATCH
from batchyard.lines.framing import joined
from batchyard.processes.threads import from_thread, in_thread
from batchyard.results.results import Outcome
from batchyard.services.keys import file_key, segments_prefix
from batchyard.services.quotas import arriving, default_quota
from batchyard.services.segments.answered_lines import AnsweredLines
from batchyard.services.user_locations import UserLocations, places_of
from batchyard.steps.create.create import check_model, parse_window
from batchyard.steps.create.destinations import check_destinations, url_facts
from batchyard.steps.fetch.input_file import wipe_unnamed
from batchyard.steps.retry.retry_lines import (
    ALL_FAILED,
    chosen_lines,
    merged_lines,
    own_lines,
)
from batchyard.storage.file import os_errors_as_ours
from batchyard.store import HiddenFor, Kept, NewBatch, NewFile
from batchyard.wire import new_batch_id, new_file_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchyard.lines.body_patch import BodyPatch
    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.steps.retry.retry_lines import LineChoice, MergedLine
    from batchyard.store import BatchOptions, BatchRecord, FileRecord, IdempotencyKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCaller:
    """Who asks for a retry: a client of the API, or, without a ``tenant``, an operator.

    A client's new batch is a client's, even if the first one is not.
    """

    tenant: str | None = None
    batches_per_hour: int | None = None
    idempotency: IdempotencyKey | None = None


_OPERATOR = RetryCaller()


async def retry_batch(services: Services, batch_id: str, **asked: Any) -> str:
    """The id of the new batch: :func:`accept_retry`, for those who need no more."""
    return (await accept_retry(services, batch_id, **asked)).id


async def accept_retry(
    services: Services,
    batch_id: str,
    *,
    choice: LineChoice = ALL_FAILED,
    patch: BodyPatch = NO_PATCH,
    completion_window: str | None = None,
    output: Location | None = None,
    error: Location | None = None,
    merges: bool = False,
    caller: RetryCaller = _OPERATOR,
) -> BatchRecord:
    """Create a batch of the chosen lines of ``batch_id``; returns the new batch.

    A line keeps its bytes, but for what the ``patch`` changes in its body, and all keep their
    order. Lines that were left out because they are bad stay left out: they would be again. If the
    batch failed without a result, the new batch has all its lines. Everything else is as before,
    except for the completion window, if one is given, and the locations: results are written to
    ``output`` and ``error`` only.

    If it ``merges``, it has all lines of the first batch. Those that are not chosen have their
    results from the start, and are not run, counted as usage or paid for again.

    Raises :class:`~batchyard.errors.RequestRefused` where there is nothing to retry,
    :class:`~batchyard.errors.QuotaExceeded`, and :class:`~batchyard.errors.StorageError` for a
    location that can never work.
    """
    batch = await services.store.batches.get(batch_id, caller.tenant)
    window = completion_window or batch.completion_window
    window_seconds = parse_window(window, services.settings)
    places = await _destinations(services, batch, output, error)
    options = await _options(services, batch, patch, is_client=caller.tenant is not None)
    receivers = (await services.store.batch_places.locations(batch.id)).receivers
    if merges and batch.is_parent:
        raise _refused(
            f"{batch.id} is a chain, whose answers are to requests of its last stage: a retry of "
            "it cannot merge.",
            "nothing_to_merge",
        )
    files = await _files_of(services, batch, choice, all_results=merges)
    limits = services.settings.limits.to_limits(of_client=options.public_urls)
    # Lines that nothing is added to may run again, also after the limit was lowered.
    most_bytes = max(limits.max_bytes, files.source.size_bytes)
    new_id = new_batch_id()
    copied = await _copy_lines(
        services, batch, files, choice, patch, most_bytes, merged_into=new_id if merges else None
    )
    file = copied.file
    new = NewBatch(
        id=new_id,
        endpoint=batch.endpoint,
        completion_window=window,
        window_seconds=window_seconds,
        input_file_id=file.id,
        metadata=batch.metadata,
        options=msgspec.structs.replace(
            options.as_asked(),
            urls=url_facts(places.output, places.error),
            merges=merges,
            kept=copied.kept,
            # What it keeps is of those engines.
            batch_invariant=options.batch_invariant if merges else None,
        ),
        locations=places.to_text(receivers),
        priority=batch.priority,
        tenant=batch.tenant,
        output_lifetime_seconds=batch.output_lifetime_seconds,
        notify_email=batch.notify_email,
        retry_of=batch.id,
        then=await services.store.chains.stages_of(batch),
    )
    try:
        made = await services.store.batches.create(
            new,
            input_file=file,
            quota=default_quota(services),
            batches_per_hour=caller.batches_per_hour,
            idempotency=caller.idempotency,
        )
    except (IdempotencyConflict, RequestRefused):
        await _wipe(services, new, file)
        raise
    # After another error the batch may be there: then these are its bytes, or else the sweep's.
    if made.id != new.id:
        # The same request was accepted before.
        await _wipe(services, new, file)
    return made


async def _wipe(services: Services, new: NewBatch, file: NewFile) -> None:
    """Remove the bytes of a batch that there will not be. What cannot be removed is the sweep's."""
    await wipe_unnamed(services, file.storage_key)
    if new.options.merges:
        async for key in services.storage.list(segments_prefix(new.id)):
            await wipe_unnamed(services, key)


async def _options(
    services: Services, batch: BatchRecord, patch: BodyPatch, *, is_client: bool
) -> BatchOptions:
    """Those of the first batch. A client may not send what only the operator's files may have."""
    settings = services.settings
    options = msgspec.structs.replace(batch.options, ledger=batch.options.ledger or settings.ledger)
    if is_client:
        options = msgspec.structs.replace(options, public_urls=True, any_body=False)
        if options.on_invalid_output is not None:
            options.on_invalid_output.check_patch(settings.bodies.to_policy())
    if (model := patch.model) is None:
        return options
    await check_model(services, model, is_client=options.public_urls, param="set")
    return msgspec.structs.replace(options, models=(model,) if options.models else ())


@dataclass(frozen=True, slots=True)
class _Files:
    """The input, and the result files that say which lines are chosen; neither: all lines."""

    source: FileRecord
    errors: FileRecord | None = None
    output: FileRecord | None = None


async def _files_of(
    services: Services, batch: BatchRecord, choice: LineChoice, *, all_results: bool
) -> _Files:
    _check_ended(batch)
    source = await _file(services, batch, "input", batch.input_file_id)
    has_results = batch.output_file_id or batch.error_file_id
    if batch.status is BatchStatus.FAILED and not has_results and choice.failed:
        return _Files(source)
    errors, output = None, None
    if (all_results or choice.looks_at_errors) and batch.error_file_id is not None:
        errors = await _file(services, batch, "error", batch.error_file_id)
    if (all_results or choice.looks_at_answers) and batch.output_file_id is not None:
        output = await _file(services, batch, "output", batch.output_file_id)
    if errors is None and output is None:
        raise _nothing_chosen(batch, choice)
    return _Files(source, errors, output)


def _check_ended(batch: BatchRecord) -> None:
    if batch.hidden_for is HiddenFor.RESPONSES:
        raise _refused(
            f"{batch.id} holds background responses: their clients see how each of them ended, "
            "and ask again.",
            "nothing_to_retry",
        )
    if batch.part_of is not None:
        raise _refused(
            f"{batch.id} is a part of {batch.part_of}: retry that one.", "nothing_to_retry"
        )
    if batch.status not in TERMINAL:
        raise _refused(
            f"{batch.id} is {batch.status.value}: wait until it has ended, or cancel it, "
            "and retry then.",
            "batch_not_finished",
        )
    if batch.in_progress_at is None:
        first = (
            "its errors say why, put that right and " if batch.status is BatchStatus.FAILED else ""
        )
        raise _refused(
            f"{batch.id} ended before its input was found valid: {first}submit the file as a new "
            "batch.",
            "batch_not_validated",
        )


def _nothing_chosen(batch: BatchRecord, choice: LineChoice) -> RequestRefused:
    why = f"No request of {batch.id} is chosen: there is nothing to retry."
    if choice == ALL_FAILED and batch.error_file_id is None:
        why = f"Every request of {batch.id} was answered: there is nothing to retry."
    elif choice == ALL_FAILED:
        why = (
            f"Every line in the error file of {batch.id} is a bad one: correct these lines and "
            "submit them as a new batch."
        )
    return _refused(why, "nothing_to_retry")


async def _file(services: Services, batch: BatchRecord, kind: str, file_id: str) -> FileRecord:
    try:
        return await services.store.files.get(file_id)
    except RecordNotFound:
        raise _file_gone(batch, kind) from None


async def _copy_lines(
    services: Services,
    batch: BatchRecord,
    files: _Files,
    choice: LineChoice,
    patch: BodyPatch,
    most_bytes: int,
    *,
    merged_into: str | None,
) -> _Copied:
    """Store the lines to retry as a file, durable but not yet recorded.

    ``merged_into``: the new batch, if it gets all lines; the results that it keeps are stored too.
    What the patch sets is in each line: a mebibyte of it would become many gigabytes. Raises
    :class:`~batchyard.errors.RequestRefused` for more than ``most_bytes``, and
    :class:`~batchyard.errors.StorageLimitExceeded`.
    """
    with os_errors_as_ours(str(services.spool)):
        folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="retry-"))
    try:
        source = await _local_path(services, batch, "input", files.source, folder)
        errors, output = None, None
        if files.errors is not None:
            errors = await _local_path(services, batch, "error", files.errors, folder)
        if files.output is not None:
            output = await _local_path(services, batch, "output", files.output, folder)
        bounded, has_earlier = _SizeBound(most_bytes), batch.options.merges

        def change(line: bytes) -> bytes:
            return bounded.counted(patch.applied(line))

        with AnsweredLines(folder, "kept") as answers:
            merge = _Merge(answers)
            if merged_into is not None:
                merged = merged_lines(
                    batch.id,
                    source,
                    errors,
                    output,
                    choice,
                    change,
                    has_earlier=has_earlier,
                )
                lines = merge.lines(merged)
            elif errors is None and output is None:
                lines = map(change, own_lines(source, has_earlier=has_earlier))
            else:
                chosen = chosen_lines(
                    batch.id,
                    source,
                    errors,
                    output,
                    choice,
                    has_earlier=has_earlier,
                    are_asked_here=not batch.is_parent,
                )
                lines = map(change, chosen)
            file_id = new_file_id()
            parts = from_thread(joined(line + b"\n" for line in lines))
            with arriving(services, batch.tenant) as within_quota:
                stored = await services.storage.put(file_key(file_id), within_quota(parts))
        if not (merge.is_chosen if merged_into else stored.size_bytes):
            await services.storage.delete(stored.key)
            raise _nothing_chosen(batch, choice)
        if merged_into is not None:
            await answers.written().store(services, merged_into)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)
    file = NewFile(
        id=file_id,
        purpose="batch",
        filename=f"{batch.id}_retry.jsonl",
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        tenant=batch.tenant,
    )
    return _Copied(file, Kept(merge.completed, merge.failed))


@dataclass(frozen=True, slots=True)
class _Copied:
    """The new batch's input, and how many of its lines have a result."""

    file: NewFile
    kept: Kept


class _Merge:
    """The lines of a batch that merges, on their way into its input; their results, aside."""

    def __init__(self, answers: AnsweredLines) -> None:
        self._answers = answers
        self.is_chosen = False
        """Whether any line runs again."""
        self.completed = self.failed = 0

    def lines(self, merged: Iterable[MergedLine]) -> Iterator[bytes]:
        for ordinal, (line, is_chosen, kept) in enumerate(merged):
            self.is_chosen = self.is_chosen or is_chosen
            if kept is not None:
                self._answers.add(ordinal, kept)
                self.completed += kept.outcome is Outcome.OUTPUT
                self.failed += kept.outcome is Outcome.ERROR
            yield line


class _SizeBound:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0

    def counted(self, line: bytes) -> bytes:
        self._bytes += len(line) + 1
        if self._bytes > self._most_bytes:
            raise RequestRefused(
                f"The changed requests would have more than {self._most_bytes:,} bytes: set less, "
                "or choose fewer lines.",
                param="set",
                code="file_too_large",
            )
        return line


async def _local_path(
    services: Services, batch: BatchRecord, kind: str, file: FileRecord, folder: Path
) -> Path:
    try:
        return await services.storage.local_path(file.storage_key, folder)
    except ObjectNotFound:
        raise _file_gone(batch, kind) from None


async def _destinations(
    services: Services, batch: BatchRecord, output: Location | None, error: Location | None
) -> UserLocations:
    """The checked locations; none may replace a file of the first batch."""
    old = await places_of(services, batch.id)
    kinds = {"input": old.input, "output": old.output, "error": old.error}
    taken = {f"the {kind} file of {batch.id}": location for kind, location in kinds.items()}
    output, error = await check_destinations(output, error, taken=taken, dataset=old.dataset)
    return UserLocations(output=output, error=error)


def _file_gone(batch: BatchRecord, kind: str) -> RequestRefused:
    return _refused(
        f"The {kind} file of {batch.id} has expired or was deleted: submit the requests that are "
        "missing as a new batch.",
        "file_gone",
    )


def _refused(message: str, code: str) -> RequestRefused:
    return RequestRefused(message, param="batch_id", code=code)
