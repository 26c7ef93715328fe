"""``batchyard results``: the result files of a batch that has ended, or its lines as they come."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.batches.follow_results import STDOUT, follow_results, write_to
from batchyard.cli.terminal import options
from batchyard.cli.terminal.offline import offline_services
from batchyard.datasets.files import TABLE_SUFFIX, is_table
from batchyard.delivery.redeliver import KINDS, deliver_to, kept_file, kept_for, redirect
from batchyard.files.cursor import Order  # noqa: TC001 - Typer reads it at run time
from batchyard.lifecycle import STOPPABLE
from batchyard.locations.location import parse_location
from batchyard.processes.threads import in_thread
from batchyard.services.user_locations import places_of
from batchyard.steps.create.destinations import check_destinations, check_paths
from batchyard.storage.compression import packed_suffix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.delivery.redeliver import Kind
    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


def results(
    batch_id: Annotated[str, options.BATCH],
    output: Annotated[
        str | None,
        typer.Option(
            *("--output", "--output-file", "-o"),
            help="Where the answers go: a path on this machine, s3://bucket/key (or az://, gs://, "
            "hf://), or a URL that takes a PUT. -: standard output, the default. If it ends in .gz "
            "or .zst, they are compressed; if in .parquet, joined to the rows of the batch's "
            "dataset.",
            show_default=False,
        ),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option("--errors", "-e", help="Where the failed lines go, in the same way."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Write each line as soon as it is finished, until the batch has ended. A file on "
            "this machine that has lines already is continued.",
        ),
    ] = False,
    order: Annotated[
        Order | None,
        typer.Option(
            help="With --follow. completion, the default: as they are finished. input: in the "
            "order of the input, as far as all lines before are finished.",
            show_default=False,
        ),
    ] = None,
    custom_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Print only the line of this request, also while the batch runs, and also if it "
            "is a failed one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the output file, the error file or both of a batch that has ended.

    If it still runs, they are written there when it ends, in place of where they were to go. They
    are kept for 30 days, unless the batch has another lifetime. Buckets have the credentials of
    the environment.

    With --follow the batch may still run: its lines come as they are finished, each once, and the
    exit status is that of `batchyard watch`.
    """
    if custom_id is not None:
        if follow or order or output is not None or errors is not None:
            raise typer.BadParameter("Give it without other options.", param_hint="--custom-id")
        asyncio.run(_print_one(batch_id, custom_id))
        return
    if order is not None and not follow:
        raise typer.BadParameter("It is for --follow.", param_hint="--order")
    if output is None and errors is None:
        output = STDOUT
    asked: dict[Kind, str | None] = {"output": output, "error": errors}
    if follow and output is not None and output.lower().endswith(TABLE_SUFFIX):
        raise typer.BadParameter("It writes JSON Lines: a table needs all answers.")
    if follow and any(place and packed_suffix(place) for place in asked.values()):
        raise typer.BadParameter("It writes lines as they come: a compressed file needs them all.")
    if follow:
        follow_results(batch_id, {kind: place for kind, place in asked.items() if place}, order)
    places = {
        kind: None if place == STDOUT else parse_location(place)
        for kind, place in asked.items()
        if place is not None
    }
    sys.exit(asyncio.run(_results(batch_id, places)))


async def _results(batch_id: str, asked: Mapping[Kind, Location | None]) -> int:
    """The exit status. A place that is None is standard output."""
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        if batch.status in STOPPABLE and all(asked.values()):
            return await _redirect(services, batch, asked)
        for kind, place in asked.items():
            await kept_for(services, batch, kind, place)
        places = await check_destinations(asked.get("output"), asked.get("error"), taken={})
        wanted = {kind: place for kind, place in zip(KINDS, places, strict=True) if place}
        failures = await deliver_to(services, batch, wanted)
        for kind, place in asked.items():
            if place is None:
                await _print(services, batch, kind)
    for failure in failures:
        typer.echo(f"batchyard: {failure}", err=True)
    table = asked.get("output")
    has_all = table is not None and is_table(table)
    if "error" not in asked and batch.error_file_id is not None and not has_all:
        typer.echo(
            f"batchyard: Lines without a good answer are in the error file: "
            f"batchyard results {batch.id} --errors FILE",
            err=True,
        )
    return 1 if failures else 0


async def _redirect(
    services: Services, batch: BatchRecord, asked: Mapping[Kind, Location | None]
) -> int:
    wanted = await places_of(services, batch.id)
    output, error = asked.get("output"), asked.get("error")
    others = {
        "input": wanted.input,
        "output": None if output else wanted.output,
        "errors": None if error else wanted.error,
    }
    check_paths(services.settings, output=output, errors=error)
    places = await check_destinations(output, error, taken=others, dataset=wanted.dataset)
    wanted_now = {kind: place for kind, place in zip(KINDS, places, strict=True) if place}
    await redirect(services, batch, wanted_now)
    typer.echo(
        f"batchyard: {batch.id} is {batch.status.value}: its results are written there when it "
        "ends.",
        err=True,
    )
    return 0


async def _print_one(batch_id: str, custom_id: str) -> None:
    # NumPy takes a tenth of the time in which any command starts.
    from batchyard.files.read_results import ResultsReader  # noqa: PLC0415 - see above

    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        found = await ResultsReader(services).find(batch, custom_id)
    write_to(sys.stdout.buffer, found.line)


async def _print(services: Services, batch: BatchRecord, kind: Kind) -> None:
    file = await kept_file(services, batch, kind)
    async for part in services.storage.get(file.storage_key):
        await in_thread(write_to, sys.stdout.buffer, part)
