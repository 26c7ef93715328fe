"""``batchyard run``: one batch, here and now. The drop-in for ``vllm run-batch``."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from batchyard.cli.metadata import parse_metadata
from batchyard.cli.progress import ProgressDisplay
from batchyard.cli.summary import summarise
from batchyard.lifecycle import BatchStatus
from batchyard.settings import read_settings
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.steps.services import Services, open_services
from batchyard.storage.location import LocalFile, parse_location

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import click

    from batchyard.engine.base import Engine
    from batchyard.settings import Settings

_OWN_OPTIONS = frozenset(
    {
        *("-i", "--input-file", "-o", "--output-file", "-e", "--errors"),
        *("--model", "--engine-url", "--endpoint", "--completion-window", "--metadata"),
        *("--resume", "--help"),
    }
)
_FLAGS = frozenset({"--help"})

# Prefect's log is for its server; the terminal has the progress display.
_QUIET_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
}


class PassThroughCommand(TyperCommand):
    """Hands words that are not ours to the engine, in their order, whatever they look like.

    Click's own way of ignoring unknown options would read ``-ep`` as ``-e p``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, engine = split_options(args)
        ctx.meta["engine_options"] = engine
        return super().parse_args(ctx, ours)


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(ours, the engine's)``."""
    ours: list[str] = []
    engine: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, separator, _ = word.partition("=")
        if name not in _OWN_OPTIONS:
            engine.append(word)
            continue
        ours.append(word)
        if not separator and name not in _FLAGS:
            ours += [value for value in [next(remaining, None)] if value is not None]
    return ours, engine


def register(app: typer.Typer) -> None:
    """Add the command; the entry point of the group ``batchyard.commands``."""
    app.command("run", cls=PassThroughCommand)(run)


def run(
    ctx: typer.Context,
    input_file: Annotated[
        str | None,
        typer.Option("--input-file", "-i", help="Path, s3://bucket/key or http(s) URL."),
    ] = None,
    output_file: Annotated[
        str | None,
        typer.Option("--output-file", "-o", help="Likewise; a presigned URL takes a PUT."),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option("--errors", "-e", help="Where failed lines go. Default: beside a local -o."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What the engine loads, as for `vllm serve`.")
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(help="Use this OpenAI-compatible server instead of starting vLLM."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Refuse lines for another endpoint. Default: mix.")
    ] = None,
    completion_window: Annotated[str, typer.Option(help="A number and m, h or d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value; may be given several times.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this batch instead of a new one.")
    ] = None,
) -> None:
    """Run a batch file on vLLM, to its result file.

    Every other option goes to vLLM unchanged, for example --max-model-len 8192.
    """
    if model is None:
        raise typer.BadParameter("Say which model to load.", param_hint="--model")
    if resume is None and (input_file is None or output_file is None):
        raise typer.BadParameter("Say what to read and where to write.", param_hint="-i and -o")
    engine_options = list(ctx.meta["engine_options"])
    models = served_names(model, engine_options)
    request = None
    if input_file is not None and output_file is not None:
        request = BatchRequest(
            input=input_file,
            output=output_file,
            error=errors or errors_beside(output_file),
            endpoint=endpoint,
            models=models,
            mixed_models=len(models) > 1,
            completion_window=completion_window,
            metadata=parse_metadata(metadata),
        )
    settings = read_settings(runners="inline")

    async def engine_for(_: str) -> Engine:
        return make_engine(settings, models[0], model, engine_options, engine_url)

    quiet_prefect()
    try:
        sys.exit(asyncio.run(_run(settings, engine_for, request, resume)))
    except KeyboardInterrupt:
        sys.exit(130)


def quiet_prefect() -> None:
    """Keep Prefect's own log off the terminal; to be called before Prefect is imported."""
    for name, value in _QUIET_PREFECT.items():
        os.environ.setdefault(name, value)


def served_names(model: str, engine_options: Sequence[str]) -> tuple[str, ...]:
    """The names that request bodies may carry, by the rule of ``vllm serve``."""
    for position, word in enumerate(engine_options):
        name, separator, value = word.partition("=")
        if name.replace("_", "-") != "--served-model-name":
            continue
        if separator:
            return (value,)
        names = []
        for following in engine_options[position + 1 :]:
            if following.startswith("-"):
                break
            names.append(following)
        return tuple(names) or (model,)
    return (model,)


def errors_beside(output: str) -> str | None:
    """``results.jsonl`` has its errors in ``results.errors.jsonl``; None for remote outputs."""
    location = parse_location(output)
    if not isinstance(location, LocalFile):
        return None
    path = location.path
    return str(path.with_name(f"{path.stem}.errors{path.suffix or '.jsonl'}"))


def make_engine(
    settings: Settings,
    name: str,
    weights: str,
    engine_options: Sequence[str],
    engine_url: str | None,
) -> Engine:
    """vLLM with these options, or the server that runs already."""
    from batchyard.engine.remote import RemoteEngine  # noqa: PLC0415 - `--help` stays quick
    from batchyard.engine.vllm import VllmEngine  # noqa: PLC0415
    from blocks.engines import block_name  # noqa: PLC0415
    from flows.worker import engine_log, engine_python  # noqa: PLC0415

    if engine_url is not None:
        return RemoteEngine(engine_url, name, api_key=os.environ.get("BATCHYARD_ENGINE_API_KEY"))
    return VllmEngine(
        name,
        engine_options,
        python=engine_python(settings),
        weights=weights,
        log_path=engine_log(settings, block_name(name)),
    )


async def _run(
    settings: Settings,
    engine_for: Callable[[str], Awaitable[Engine]],
    request: BatchRequest | None,
    resume: str | None,
) -> int:
    """The exit status: 0 for a completed batch whose files are where they were wanted."""
    from flows.worker import s3_credentials_from_block  # noqa: PLC0415

    with ProgressDisplay() as display:
        async with open_services(
            settings,
            engine_for=engine_for,
            s3_credentials=s3_credentials_from_block,
            on_progress=display,
        ) as services:
            batch_id = resume or await create_batch(services, request)
            try:
                return await run_to_end(services, batch_id)
            except asyncio.CancelledError:
                typer.echo(f"\nStopped. What is finished is kept: --resume {batch_id}", err=True)
                raise


async def run_to_end(services: Services, batch_id: str) -> int:
    """Run the process-batch flow in this process and say how the batch ended."""
    from flows.process_batch import UNDELIVERED, process_batch  # noqa: PLC0415

    state = await process_batch(batch_id, return_state=True)
    batch = await services.store.batches.get(batch_id)
    typer.echo(await summarise(services, batch), err=True)
    if batch.status is BatchStatus.COMPLETED and state.name != UNDELIVERED:
        return 0
    if batch.status is not BatchStatus.FAILED:
        typer.echo(f"batchyard: {state.message}", err=True)
    return 1
