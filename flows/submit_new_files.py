"""submit-new-files: a batch for each new file in a folder, by a schedule or when an event says so.

A run looks once, hands in what is new and ends. `run-batches` runs the batches.
"""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from prefect import flow
from prefect.states import Completed, Failed, State
from pydantic import Field

from batchyard.batch.batch_options import describe_parameters, with_parameters
from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.errors import BatchyardError, DispatchFailed, RequestRefused, SettingsError
from batchyard.locations.folder import LocalFolder, parse_folder
from batchyard.logs import event_logger
from batchyard.steps.create.new_files import NewFiles
from batchyard.steps.create.new_files import submit_new_files as submit_files
from flows.process.worker import worker_services
from flows.shown.artifacts import create_artifact
from flows.shown.run_page import NOT_SHOWN, name_run
from flows.submit_batch import batch_request, submit_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.locations.folder import BucketPrefix
    from batchyard.services.services import Services
    from batchyard.settings import Settings

log = event_logger(__name__)

F = TypeVar("F", bound="Callable[..., Any]")

_ONE_FILE: Final = frozenset({"input", "output", "errors"})
"""Parameters of `submit-batch` that say where one file is."""


def _of_batch(function: F) -> F:
    """The function with the parameters of `submit-batch` for each batch, in its docstring too."""
    offered = inspect.signature(submit_batch.fn).parameters.values()
    taken = [each for each in offered if each.name not in _ONE_FILE]
    schema = submit_batch.parameters.properties
    described = [
        f"{each.name}: {' '.join(schema[each.name]['description'].split())}" for each in taken
    ]
    describe_parameters(function, described)
    by_name = [each.replace(kind=each.KEYWORD_ONLY) for each in taken]
    return with_parameters(function, by_name)


Place = Annotated[
    str,
    Field(
        json_schema_extra={
            "if": {"pattern": "^($|/|([Ss]3|[Aa][Zz]|[Gg][Ss])://.)"},
            "else": {
                "const": "s3://bucket/prefix/ (or az://, gs://), or the absolute path of a folder"
            },
        }
    ),
]


@flow(name="submit-new-files", persist_result=False)
@_of_batch
async def submit_new_files(
    input_prefix: Place,
    output_prefix: Place = "",
    max_batches: int = 100,
    **of_batch: Any,
) -> State:
    """Create a batch for each .jsonl file in a folder that has none yet.

    With a template, .parquet files are taken too, and their results are written as .parquet. Runs
    may be repeated, and several may look at the same folder: a file makes one batch.

    Args:
        input_prefix: Where the files are: s3://bucket/prefix/ (or az://, gs://) or the absolute
            path of a folder, with what is below it.
        output_prefix: Where the results go, in the same way: of name.jsonl, name.results.jsonl and
            name.errors.jsonl. It must not be in the input. Empty: they stay in Batchyard's own
            store.
        max_batches: The most batches that one run creates. The next run goes on.
        {of_batch}
    """
    try:
        await name_run(input_prefix)
        source = _folder("input_prefix", input_prefix)
        target = _folder("output_prefix", output_prefix) if output_prefix else None
        async with worker_services() as services:
            _check_machine(services.settings, input_prefix=source, output_prefix=target)
            request = batch_request(services.settings, **of_batch)
            done = await submit_files(services, source, target, request, limit=max_batches)
            if done.batches:
                await _start_runner(services)
        await _report(done, input_prefix)
        return Completed(message=_in_words(done), data=done.batches)
    except BatchyardError as error:
        return Failed(message=str(error), data=error)


def _folder(name: str, text: str) -> BucketPrefix | LocalFolder:
    folder = parse_folder(text)
    if isinstance(folder, LocalFolder) and not folder.path.is_absolute():
        raise RequestRefused(
            f"{name} must be an absolute path, because workers run in another folder.",
            param=name,
            code="invalid_value",
        )
    return folder


def _check_machine(settings: Settings, **folders: BucketPrefix | LocalFolder | None) -> None:
    """Refuse a path where the batches may be run on another machine than this one."""
    if settings.knows_its_machine:
        return
    for name, folder in folders.items():
        if isinstance(folder, LocalFolder):
            raise RequestRefused(
                f"{name} is the path {folder}, and the batches may be run on another machine than "
                f"{settings.this_machine}: give s3://bucket/prefix/ (or az://, gs://). If a path "
                "means the same on every machine, set BATCHYARD_SHARED_PATHS=true.",
                param=name,
                code="invalid_value",
            )


async def _start_runner(services: Services) -> None:
    # Where this fails, the reconciler does it within seconds.
    with suppress(DispatchFailed, SettingsError):
        async with PrefectApi.from_environment() as api:
            await ensure_batch_runner(
                api, services.store, silent_seconds=services.settings.batch_lease_seconds
            )


async def _report(done: NewFiles, input_prefix: str) -> None:
    """A table of what became of the files that were new, as an artifact of the flow run."""
    rows = [{"file": name, "batch": batch} for name, batch in done.batches.items()]
    rows += [{"file": name, "batch": f"none: {reason}"} for name, reason in done.refused.items()]
    if not rows:
        return
    try:
        await create_artifact(
            kind="table", data=json.dumps(rows), description=f"New files of {input_prefix}"
        )
    except NOT_SHOWN as error:
        log.warning("report.not_shown", type(error).__name__)


def _in_words(done: NewFiles) -> str:
    counts = {
        "files that had one already": done.known,
        "refused": len(done.refused),
        "may still be written": done.unfinished,
    }
    said = f"batches created: {len(done.batches):,}" + "".join(
        f", {what}: {count:,}" for what, count in counts.items() if count
    )
    return said if done.held_back is None else f"{said}. The others wait: {done.held_back}"
