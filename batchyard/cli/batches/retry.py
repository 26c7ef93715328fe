"""``batchyard retry``: a new batch from lines of another one, as they were or changed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from batchyard.cli.batches.show import show
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT
from batchyard.cli.terminal.ensure_runner import ensure_runner
from batchyard.cli.terminal.offline import offline_services
from batchyard.dispatch import PrefectApi
from batchyard.lines.body_patch import BodyPatch, parse_assignment
from batchyard.locations.access import Location  # noqa: TC001 - Typer reads it at run time
from batchyard.services.machine.shared_database import check_shared_database
from batchyard.steps.create.destinations import check_paths
from batchyard.steps.retry.retry import retry_batch
from batchyard.steps.retry.retry_lines import LineChoice


def retry(
    batch_id: Annotated[str, options.BATCH],
    output_file: Annotated[Location | None, options.OUTPUT_FILE] = None,
    errors: Annotated[Location | None, options.ERRORS] = None,
    completion_window: Annotated[
        str | None,
        typer.Option(
            help="A number and m, h or d, or background. Default: the window of the old batch."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set this field of each body, for example max_tokens=4096; you may repeat this "
            "option. Dots lead into nested objects. The value is JSON, or else a text.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Remove this field; you may repeat this option."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All failed lines. Default if no lines are chosen.")
    ] = False,
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE,…",
            help="Failed lines with one of these codes, error types or HTTP statuses.",
        ),
    ] = None,
    finish_reason: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REASON,…",
            help="Lines whose answers ended with one of these; `length`: they were cut off.",
        ),
    ] = None,
    invalid_json: Annotated[
        bool,
        typer.Option(
            "--invalid-json",
            help="Lines whose answers are not JSON, or do not fit the JSON schema in their "
            "request.",
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="The new batch has all lines: the others keep their results, so that one pair of "
            "files has the newest result of each line.",
        ),
    ] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Make a new batch from lines of a batch that has ended, and print its id.

    By default these are the lines of its error file, as they were. If the batch failed without
    result files, all its lines are submitted again.
    """
    choice = LineChoice(
        failed=failed,
        codes=_words(code),
        finish_reasons=_words(finish_reason),
        invalid_json=invalid_json,
    )
    asked = {
        "choice": choice.or_failed(),
        "patch": BodyPatch.of(dict(map(parse_assignment, set_ or ())), unset or ()),
        "completion_window": completion_window,
        "output": output_file,
        "error": errors,
        "merges": merge,
    }
    new_id = asyncio.run(_retry(batch_id, asked, is_quiet=as_json))
    if as_json:
        show(new_id, as_json=True)


def _words(given: list[str] | None) -> frozenset[str]:
    """Those of an option that may be repeated, or have several with commas between them."""
    return frozenset(word for text in given or () for word in text.split(",") if word)


async def _retry(batch_id: str, asked: dict[str, Any], *, is_quiet: bool) -> str:
    async with PrefectApi.from_environment() as api, offline_services() as services:
        check_shared_database(services.settings)
        check_paths(services.settings, output=asked["output"], errors=asked["error"])
        new_id = await retry_batch(services, batch_id, **asked)
        typer.echo(new_id, err=is_quiet)
        await ensure_runner(api, services, new_id)
    return new_id
