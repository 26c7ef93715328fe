"""``batchyard estimate``: what to expect of a file, without running it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.batch.batch_options import Door, Validation
from batchyard.cli.batches.batch_options import of_batch
from batchyard.cli.batches.batch_view import error_words
from batchyard.cli.batches.ignored_fields import ignored_by_vllm
from batchyard.cli.batches.prompt_counter import counter_of
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.dispatch import OfferedModels
from batchyard.errors import StoreError
from batchyard.locations.location import parse_location
from batchyard.logs.printable import printable
from batchyard.logs.time_words import duration, relative
from batchyard.settings import read_settings
from batchyard.steps.create.create import DEFAULT_TENANT, parse_window
from batchyard.steps.prepare.deep_validation import findings_words

if TYPE_CHECKING:
    from batchyard.locations.access import Location
    from batchyard.settings import Settings
    from batchyard.steps.estimate import Assumptions, Estimate, FindCounter
    from batchyard.steps.forecast.known_model import Known

_WIDTH = 16


@of_batch(Door.ESTIMATE)
def estimate(
    input_file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Path, s3://bucket/key (or az://, gs://, hf://) or URL."
        ),
    ],
    client_rules: Annotated[bool, options.CLIENT_RULES] = True,
    cache_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in the engine's KV cache; vLLM's log has the number.")
    ] = 100_000,
    sequences: Annotated[
        int, typer.Option(min=1, help="Requests that the engine runs at once: --max-num-seqs.")
    ] = 256,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of one block of the KV cache: --block-size.")
    ] = 16,
    bytes_per_token: Annotated[
        float, typer.Option(min=0.1, help="How many bytes of these prompts make one token.")
    ] = 4.0,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="For `deep`: the folder or hub id of the model. Default: that of its block.",
        ),
    ] = None,
    engine_options: Annotated[
        str, typer.Option(help="With --weights: the engine's options, as in its block.")
    ] = "",
    *,
    as_json: Annotated[bool, OBJECT] = False,
    **given: Any,
) -> None:
    """Validate and plan a file and print what to expect, without submitting it.

    Bad lines are listed, and then the exit status is 1.
    """
    # NumPy takes a tenth of the time in which any command starts; this is the only one to need it.
    from batchyard.plan.cache import CacheShape  # noqa: PLC0415 - see above
    from batchyard.steps.estimate import Assumptions  # noqa: PLC0415 - see above

    settings, tenant = read_settings(), given["tenant"] or DEFAULT_TENANT
    window_seconds = parse_window(given["completion_window"], settings)
    assumptions = Assumptions(
        model=given["model"],
        endpoint=given["endpoint"],
        deduplicates=given["deduplicate"],
        any_body=not client_rules,
        bytes_per_token=bytes_per_token,
        shape=CacheShape(max(1, cache_tokens // block_size), block_size, sequences),
    )
    find_counter = None
    if given["validation"] == Validation.DEEP:
        find_counter = partial(counter_of, settings, weights=weights, options=engine_options)
    found, known, why_not = asyncio.run(
        _estimate(settings, parse_location(input_file), assumptions, tenant, find_counter)
    )
    ignored = asyncio.run(ignored_by_vllm(settings, found.fields))
    if as_json:
        print_object(_object(found, known) | {"ignored_fields": ignored})
    else:
        lines = [
            *_lines(found, known, why_not, assumptions),
            *_hours_lines(found, known, given["completion_window"], window_seconds),
            *(_line("warning", f"vLLM ignores body.{n}: {k:,} lines") for n, k in ignored.items()),
            *_errors(found),
        ]
        typer.echo("\n".join(lines))
    if found.errors:
        raise typer.Exit(1)


async def _estimate(
    settings: Settings,
    location: Location,
    assumptions: Assumptions,
    tenant: str,
    find_counter: FindCounter | None,
) -> tuple[Estimate, Known, str | None]:
    """The estimate, what is known of its model, and why no rate is."""
    from batchyard.steps.estimate import estimate_file  # noqa: PLC0415 - see above
    from batchyard.steps.forecast.known_model import Known, known_of, learned_lengths  # noqa: PLC0415 - see above

    if os.environ.get("PREFECT_API_URL"):
        assumptions = replace(assumptions, offer=await OfferedModels().offer())
    find_lengths = partial(learned_lengths, settings, tenant)
    found = await estimate_file(settings, location, assumptions, find_lengths, find_counter)
    if found.model is None:
        return found, Known(), "no line names a model"
    try:
        known = await known_of(settings, found.model)
    except StoreError as error:
        return found, Known(), f"the database does not answer ({error})"
    if known.tokens_per_second is None:
        return found, known, f"no batch of model {found.model} has run yet"
    return found, known, None


def _lines(
    found: Estimate, known: Known, why_not: str | None, assumptions: Assumptions
) -> list[str]:
    copies = f", {found.copies:,} of them answered by an identical request" if found.copies else ""
    lines = [
        _line("requests", f"{found.requests:,}{copies}"),
        _line("prompt tokens", _prompt_words(found, assumptions)),
        _line("output tokens", _output_words(found)),
    ]
    order = found.order
    if order is not None:
        shape = assumptions.shape
        lines += [
            _line(
                "from the cache",
                f"{100 * order.ours.hit_rate:.0f} % in our order, "
                f"{100 * order.as_written.hit_rate:.0f} % in the file's, "
                f"{100 * order.ceiling.hit_rate:.0f} % at most",
            ),
            _line(
                "gain of order",
                f"{order.gain:.1f}×, with {shape.blocks * shape.block_tokens:,} tokens of "
                f"KV cache and {shape.sequences} sequences",
            ),
        ]
        if order.simulated_requests < found.requests - found.copies:
            lines.append(_line("", f"from a sample of {order.simulated_requests:,} requests"))
    seconds, rate = known.seconds_for(found), known.rate
    if seconds is None or rate is None:
        lines.append(_line("time", f"unknown: {why_not}"))
    else:
        lines.append(
            _line(
                "time",
                f"{duration(seconds)} on one engine, at {rate.tokens_per_second:,.0f} tokens a "
                f"second as measured on pool {rate.pool}",
            )
        )
    return lines


def _prompt_words(found: Estimate, assumptions: Assumptions) -> str:
    guessed = f"{found.prompt_tokens:,} at {assumptions.bytes_per_token:g} bytes a token"
    if found.deep is None:
        return guessed
    words = findings_words(found.deep)
    if found.deep.uncounted or not found.deep.counted:
        return f"{guessed}; {words}"
    return f"{words}; by the model's own tokenizer"


def _output_words(found: Estimate) -> str:
    runs = found.requests - found.copies
    if not found.learned_requests:
        return f"up to {found.output_tokens:,}, by max_tokens"
    if found.learned_requests == runs:
        return f"about {found.output_tokens:,}, as earlier answers were"
    return (
        f"about {found.output_tokens:,}, as earlier answers were for {found.learned_requests:,} "
        "requests, the others by max_tokens"
    )


def _hours_lines(found: Estimate, known: Known, window: str, window_seconds: int) -> list[str]:
    """What the hours of the engine make of it, and of the completion window."""
    lines = []
    opening = known.hours.opening(known.now)
    if known.hours.windows:
        is_open = known.hours.is_open(known.now)
        words = "batches may run now" if is_open else known.hours.opening_words(known.now)
        lines.append(_line("hours", words))
    done_in = known.done_in(found)
    if done_in is not None and known.hours.windows:
        lines.append(_line("done", f"{relative(done_in)}, by these hours"))
    if opening is None or opening - known.now >= window_seconds:
        lines.append(_line("warning", f"no hours begin within the completion window, {window}"))
    elif done_in is not None and done_in > window_seconds:
        lines.append(_line("warning", f"that is after the completion window, {window}"))
    return lines


def _line(name: str, words: str) -> str:
    return f"{name:<{_WIDTH}}{printable(words)}"


def _errors(found: Estimate) -> list[str]:
    if not found.errors:
        return []
    lines = ["", "The file would be refused; the figures are for its good lines."]
    if found.bad_lines:
        noun = "line is" if found.bad_lines == 1 else "lines are"
        advice = " To run the others: --on-invalid error_file" if found.requests else ""
        lines.append(f"{found.bad_lines:,} {noun} bad.{advice}")
    return lines + [f"  {error_words(error)}" for error in found.errors]


def _object(found: Estimate, known: Known) -> dict[str, Any]:
    order, rate = found.order, known.rate
    return {
        "model": found.model,
        "requests": found.requests,
        "deduplicated_requests": found.copies,
        "prompt_tokens": found.prompt_tokens,
        "counted_prompt_tokens": None if found.deep is None else found.deep.prompt_tokens,
        "uncounted_lines": None if found.deep is None else found.deep.uncounted,
        "output_tokens": found.output_tokens,
        "learned_requests": found.learned_requests,
        "hit_rate": None if order is None else order.ours.hit_rate,
        "hit_rate_file_order": None if order is None else order.as_written.hit_rate,
        "hit_rate_ceiling": None if order is None else order.ceiling.hit_rate,
        "simulated_requests": None if order is None else order.simulated_requests,
        "gain": None if order is None else order.gain,
        "seconds": known.seconds_for(found),
        "done_in_seconds": known.done_in(found),
        "opens_at": known.hours.opening(known.now) if known.hours.windows else None,
        "tokens_per_second": None if rate is None else rate.tokens_per_second,
        "bad_lines": found.bad_lines,
        "errors": found.errors,
    }
