"""``batchyard run``: one batch, here and now. The drop-in for ``vllm run-batch``."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.batch.batch_options import Door
from batchyard.cli.batches.batch_options import asked, of_batch
from batchyard.cli.terminal import options
from batchyard.cli.terminal.engine_words import PassThroughCommand
from batchyard.cli.terminal.progress import ProgressDisplay
from batchyard.cli.terminal.say import say
from batchyard.cli.terminal.stoppable import run_stoppable
from batchyard.datasets.files import has_local_files, is_table
from batchyard.datasets.process import check_installed
from batchyard.errors import ObjectNotFound, RequestRefused
from batchyard.locations.access import Location  # noqa: TC001 - Typer reads it at run time
from batchyard.locations.local_file import LocalFile, check_source
from batchyard.locations.location import parse_location
from batchyard.services.machine.home import in_home
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.storage.compression import packed_suffix, unpacked_name
from commands.engine_choice import EngineChoice, ServerUse
from commands.foreground import how_to_resume, prepare_prefect, run_to_end

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchyard.engine.base import Engine
    from batchyard.lines.offer import Offer
    from batchyard.settings import Settings
    from commands.prefect.own import OwnPrefect


def register(app: typer.Typer) -> None:
    """Add the command; the entry point of the group ``batchyard.commands``."""
    settings = {"help_option_names": ["-h", "--help"]}
    app.command("run", cls=PassThroughCommand, context_settings=settings)(run)


@of_batch(Door.RUN)
def run(
    ctx: typer.Context,
    input_file: Annotated[Location | None, options.INPUT_FILE] = None,
    output_file: Annotated[Location | None, options.OUTPUT_FILE] = None,
    errors: Annotated[
        Location | None,
        typer.Option(
            *("--errors", "-e"),
            parser=parse_location,
            metavar="PLACE",
            help="Where failed lines go. Default: next to a local -o.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to load, as for `vllm serve`.")
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            help="Use this OpenAI-compatible server instead of starting vLLM. "
            "BATCHYARD_ENGINE_API_KEY has its key."
        ),
    ] = None,
    engine_seats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many requests the server at --engine-url runs at once, its max_num_seqs. "
            "The batch uses half of them, fewer if others need more than a quarter, and more "
            "while no one else uses the server. Default: Batchyard asks the server, and finds "
            "what is fastest if it does not answer.",
        ),
    ] = None,
    engine_ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Objective for the other users of the server at --engine-url: p99 of the time to "
            "first token in milliseconds. The batch uses as much of the server as this allows.",
        ),
    ] = None,
    engine_itl_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Objective for the other users of that server: p99 of the time between two "
            "tokens (inter-token latency) in milliseconds.",
        ),
    ] = None,
    engine_latency_quantile: Annotated[
        float | None,
        typer.Option(
            min=0.5, max=0.9999, help="The quantile of these objectives. Default: 0.99 (p99)."
        ),
    ] = None,
    engine_reserve_seats: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many seats of that server are always left free. Default: one in 16.",
        ),
    ] = None,
    engine_priority: Annotated[
        int | None,
        typer.Option(
            help="The priority that requests carry, for a vLLM that runs with "
            "--scheduling-policy priority: requests with a lower one go first. vLLM ignores it "
            "without that option; other servers may refuse it.",
        ),
    ] = None,
    engine_adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A LoRA adapter that the server at --engine-url has for --model: lines may name "
            "it. You may repeat this option.",
        ),
    ] = None,
    exclusive: Annotated[
        bool,
        typer.Option(
            "--exclusive",
            help="The server at --engine-url has no other users: the batch may use all of it.",
        ),
    ] = False,
    *,
    client_rules: Annotated[bool, options.CLIENT_RULES] = False,
    resume: Annotated[
        str | None,
        typer.Option(help="Continue this batch where it stopped, with its own input and output."),
    ] = None,
    **given: Any,
) -> None:
    """Run a batch file on vLLM and write its result file.

    All other options are passed to vLLM unchanged, for example --max-model-len 8192. The exit
    status is 0 if the batch is completed and at least one request succeeded.
    """
    own_prefect = prepare_prefect()
    for name in ctx.meta["left_out"]:
        typer.echo(f"batchyard: {name} has no meaning here and is ignored.", err=True)
    choice = EngineChoice.of(
        model,
        ctx.meta["engine_options"],
        engine_url,
        use=ServerUse(
            seats=engine_seats,
            exclusive=exclusive,
            ttft_ms=engine_ttft_ms,
            itl_ms=engine_itl_ms,
            latency_quantile=engine_latency_quantile,
            reserve_seats=engine_reserve_seats,
            priority=engine_priority,
            adapters=tuple(engine_adapter or ()),
        ),
        client_rules=client_rules,
    )
    what: BatchRequest | str
    if resume is not None:
        what = resume
    elif input_file is None or output_file is None:
        raise typer.BadParameter("Give an input file and an output file.", param_hint="-i and -o")
    else:
        is_dataset = given["template"] is not None
        check_is_there(input_file, is_dataset=is_dataset)
        if is_dataset:
            check_installed()
        what = asked(
            given,
            input=input_file,
            output=output_file,
            error=errors or errors_beside(output_file),
            models=choice.models,
            mixed_models=len(choice.models) != 1,
            any_body=not client_rules,
            is_inline=True,
        )
    # One operator's own file: nothing is hidden from anybody in the engine's cache.
    settings = read_settings(runners="inline", cache_shared_by="all")
    with in_home(settings):  # the engine's log is there
        choice.make(settings, "")  # what is wrong with it shows before anything is read
    sys.exit(run_stoppable(lambda: _run(settings, choice, own_prefect, what)))


def check_is_there(place: Location, *, is_dataset: bool) -> None:
    """Before a Prefect server is started, raises ObjectNotFound for a path without anything, and
    LocationRefused for a folder or a pipe. A dataset may be a folder.
    """
    if isinstance(place, LocalFile):
        path = place.path.absolute()
        if not has_local_files(path):
            raise ObjectNotFound(f"{path} does not exist")
        if not is_dataset:
            check_source(path)


def errors_beside(output: Location) -> Location | None:
    """``results.jsonl`` has its errors in ``results.errors.jsonl``; None for remote outputs.

    A table has those rows itself. They are JSON lines nevertheless, for a retry.
    """
    if not isinstance(output, LocalFile):
        return None
    path = output.path.with_name(unpacked_name(output.filename))
    suffix = ".jsonl" if is_table(output) else path.suffix or ".jsonl"
    suffix += packed_suffix(output.filename)
    return LocalFile(path.with_name(f"{path.stem}.errors{suffix}"))


async def _run(
    settings: Settings, choice: EngineChoice, own_prefect: OwnPrefect, what: BatchRequest | str
) -> int:
    """Run a new batch, or an old one by its id, to its end; the exit status.

    The last text is printed when the display has ended, which would draw over it.
    """
    from flows.process.control import control_services  # noqa: PLC0415 - it imports Prefect
    from flows.process.worker import credentials_from_block  # noqa: PLC0415 - see above

    async def engine_for(model: str) -> Engine:
        return choice.make(settings, model)

    async def endpoints_of(_: str | None) -> frozenset[str] | None:
        return choice.endpoints

    async def find_offer(_: Collection[str]) -> Offer:
        return choice.offer

    batch_id = None
    try:
        with ProgressDisplay() as display:
            async with open_services(
                settings,
                engine_for=engine_for,
                endpoints_of=endpoints_of,
                find_offer=find_offer,
                credentials=credentials_from_block,
                on_progress=display,
            ):
                async with control_services() as services:
                    batch_id = await _batch_id(services, choice, what)
                    ending = await run_to_end(services, batch_id, own_prefect)
                if ending.status:
                    display.fail()
    except asyncio.CancelledError:
        kept = how_to_resume(batch_id) if batch_id else "No batch was made."
        say(f"Stopped. {kept}", err=True)
        raise
    say(ending.text, err=True)
    return ending.status


async def _batch_id(services: Services, choice: EngineChoice, what: BatchRequest | str) -> str:
    if isinstance(what, BatchRequest):
        # Ours from the start: workers that share the database must not take it up.
        return await create_batch(services, what, owner=services.owner)
    batch = await services.store.batches.get(what)
    offered = set(choice.models)
    if offered and not offered >= set(batch.options.models):
        raise RequestRefused(
            f"{batch.id} is for {', '.join(batch.options.models)}: give the same --model and "
            "--served-model-name as when it was made.",
            param="model",
            code="invalid_value",
        )
    return batch.id
