"""``batchyard submit``: hand a batch to the runners and return at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.batch.batch_options import Door
from batchyard.cli.batches.batch_options import asked, of_batch
from batchyard.cli.batches.show import show
from batchyard.cli.batches.watch import watch
from batchyard.cli.terminal import options
from batchyard.cli.terminal.ensure_runner import ensure_runner
from batchyard.cli.terminal.offline import offline_services
from batchyard.dispatch import PrefectApi
from batchyard.locations.access import Location  # noqa: TC001 - Typer reads it at run time
from batchyard.locations.location import parse_location
from batchyard.locations.several import one_of
from batchyard.services.machine.shared_database import check_shared_database
from batchyard.steps.create.create import create_batch
from batchyard.steps.create.destinations import check_paths
from batchyard.steps.forecast.forecast import late_hours

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.steps.create.create import BatchRequest


@of_batch(Door.SUBMIT)
def submit(
    files: Annotated[
        list[Location] | None,
        typer.Argument(
            metavar="FILE",
            parser=parse_location,
            help="The inputs: paths, s3://bucket/key (or az://, gs://, hf://) or http(s) URLs, "
            "whose lines are one batch.",
            show_default=False,
        ),
    ] = None,
    input_file: Annotated[Location | None, options.INPUT_FILE] = None,
    output_file: Annotated[Location | None, options.OUTPUT_FILE] = None,
    errors: Annotated[Location | None, options.ERRORS] = None,
    *,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Follow the batch until it has ended, as `batchyard watch` does. Ctrl-C ends only "
            "the command.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the Batch object; with --wait, the object at the batch's end."
        ),
    ] = False,
    **given: Any,
) -> None:
    """Create a batch for the workers, print its id, and return at once.

    Presigned URLs are kept encrypted in the database and are never shown to Prefect.
    """
    places = [*([] if input_file is None else [input_file]), *(files or ())]
    if not places:
        raise typer.BadParameter("Give an input file.", param_hint="FILE or -i")
    request = asked(given, input=one_of(places), output=output_file, error=errors)
    batch_id = asyncio.run(_submit(request, is_quiet=as_json))
    if wait:
        watch(batch_id, as_json=as_json)
    elif as_json:
        show(batch_id, as_json=True)


async def _submit(request: BatchRequest, *, is_quiet: bool) -> str:
    async with PrefectApi.from_environment() as api, offline_services() as services:
        check_shared_database(services.settings)
        check_paths(services.settings, output=request.output, errors=request.error)
        batch_id = await create_batch(services, request)
        # Before anything else can fail: a user who has the id does not submit again.
        typer.echo(batch_id, err=is_quiet)
        await _warn_of_hours(services, batch_id)
        await ensure_runner(api, services, batch_id)
    return batch_id


async def _warn_of_hours(services: Services, batch_id: str) -> None:
    """Where the model is not given, it is known later, and the batch's log says it."""
    batch = await services.store.batches.get(batch_id)
    for model in batch.models[:1]:
        if late := await late_hours(services, model, batch.expires_at):
            typer.echo(f"batchyard: {late}.", err=True)
