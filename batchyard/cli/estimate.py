"""``batchyard estimate``: what to expect of a file, without running it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.cli import options
from batchyard.cli.as_json import OBJECT, print_object
from batchyard.errors import StoreError
from batchyard.settings import read_settings
from batchyard.storage.location import parse_location
from batchyard.time_words import duration

if TYPE_CHECKING:
    from batchyard.steps.estimate import Assumptions, Estimate
    from batchyard.storage.access import Location
    from batchyard.store import RateRecord

_WIDTH = 16


def estimate(
    input_file: Annotated[
        str, typer.Argument(metavar="FILE", help="Path, s3://bucket/key or http(s) URL.")
    ],
    model: Annotated[str | None, typer.Option(help="The model that every line must name.")] = None,
    endpoint: Annotated[str | None, options.ENDPOINT] = None,
    deduplicate: Annotated[bool, options.DEDUPLICATE] = False,
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
    tenant: Annotated[
        str, typer.Option(help="The tenant whose earlier answers say how long these will be.")
    ] = "default",
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Validate and plan a file and print what to expect, without submitting it.

    Bad lines are listed, and then the exit status is 1.
    """
    # NumPy takes a tenth of the time in which any command starts; this is the only one to need it.
    from batchyard.cache import CacheShape  # noqa: PLC0415
    from batchyard.steps.estimate import Assumptions  # noqa: PLC0415

    assumptions = Assumptions(
        model=model,
        endpoint=endpoint,
        deduplicates=deduplicate,
        any_body=not client_rules,
        bytes_per_token=bytes_per_token,
        shape=CacheShape(max(1, cache_tokens // block_size), block_size, sequences),
    )
    found, rate, why_not = asyncio.run(_estimate(parse_location(input_file), assumptions, tenant))
    if as_json:
        print_object(_object(found, rate))
    else:
        typer.echo("\n".join([*_lines(found, rate, why_not, assumptions), *_errors(found)]))
    if found.errors:
        raise typer.Exit(1)


async def _estimate(
    location: Location, assumptions: Assumptions, tenant: str
) -> tuple[Estimate, RateRecord | None, str | None]:
    """The estimate, the model's rate, and why there is none."""
    from batchyard.steps.estimate import (  # noqa: PLC0415 - see above
        estimate_file,
        learned_lengths,
        measured_rate,
    )

    settings = read_settings()
    find_lengths = partial(learned_lengths, settings, tenant)
    found = await estimate_file(settings, location, assumptions, find_lengths)
    if found.model is None:
        return found, None, "no line names a model"
    try:
        rate = await measured_rate(settings, found.model)
    except StoreError as error:
        return found, None, f"the database does not answer ({error})"
    if rate is None or not rate.tokens_per_second:
        return found, None, f"no batch of model {found.model} has run yet"
    return found, rate, None


def _seconds(found: Estimate, rate: RateRecord | None) -> float | None:
    """On one engine that has nothing else to do, loading included."""
    if rate is None or not rate.tokens_per_second:
        return None
    return found.planned_tokens / rate.tokens_per_second + (rate.load_seconds or 0.0)


def _lines(
    found: Estimate, rate: RateRecord | None, why_not: str | None, assumptions: Assumptions
) -> list[str]:
    each = f"at {assumptions.bytes_per_token:g} bytes a token"
    copies = f", {found.copies:,} of them answered by an identical request" if found.copies else ""
    lines = [
        _line("requests", f"{found.requests:,}{copies}"),
        _line("prompt tokens", f"{found.prompt_tokens:,} {each}"),
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
    seconds = _seconds(found, rate)
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


def _line(name: str, words: str) -> str:
    return f"{name:<{_WIDTH}}{words}"


def _errors(found: Estimate) -> list[str]:
    if not found.errors:
        return []
    lines = ["", "The file would be refused; the figures are for its good lines."]
    for error in found.errors:
        where = f"line {error.line}: " if error.line is not None else ""
        lines.append(f"  {where}{error.code}: {error.message}")
    return lines


def _object(found: Estimate, rate: RateRecord | None) -> dict[str, Any]:
    order = found.order
    return {
        "model": found.model,
        "requests": found.requests,
        "deduplicated_requests": found.copies,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "learned_requests": found.learned_requests,
        "hit_rate": None if order is None else order.ours.hit_rate,
        "hit_rate_file_order": None if order is None else order.as_written.hit_rate,
        "hit_rate_ceiling": None if order is None else order.ceiling.hit_rate,
        "simulated_requests": None if order is None else order.simulated_requests,
        "gain": None if order is None else order.gain,
        "seconds": _seconds(found, rate),
        "tokens_per_second": None if rate is None else rate.tokens_per_second,
        "errors": found.errors,
    }
