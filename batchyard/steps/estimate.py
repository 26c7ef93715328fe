"""Estimate: what running a file would take, without an engine. It changes nothing.

It is validated and planned as a batch would be, in a folder of its own; a simulated prefix cache
says what the order of its requests is worth.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from batchyard.errors import InputRefused
from batchyard.lines.body_fields import FieldCounts
from batchyard.lines.lines import Validator
from batchyard.lines.offer import ANYTHING, Offer
from batchyard.lines.rules import Rules
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import read_location
from batchyard.logs import event_logger
from batchyard.plan.cache import CacheShape, Reuse, ceiling, prefix_tree, simulate
from batchyard.plan.lengths import PROMPT_WORK, LengthHistory
from batchyard.plan.planner import Planner, PlanSummary
from batchyard.plan.records import BYTES_PER_TOKEN, read_records
from batchyard.processes.threads import in_executor, in_thread
from batchyard.services.services import access_with
from batchyard.steps.forecast.known_lengths import KnownLengths, nothing_learned
from batchyard.steps.prepare.deep_validation import DeepValidation, first_model
from batchyard.storage.compression import MAGIC_BYTES, is_packed
from batchyard.storage.file import os_errors_as_ours, write_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import numpy.typing as npt

    from batchyard.batch_error import BatchError
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.locations.access import Location
    from batchyard.settings import Settings
    from batchyard.steps.prepare.deep_validation import DeepFindings, NoCounter

log = event_logger(__name__)

_REPORTED_ERRORS = 1000
_SIMULATED_REQUESTS = 200_000
"""The most requests that are simulated, and the size of the sample of a longer file: this many take
about a second in each order."""
_PIECES = 8
FindCounter: TypeAlias = "Callable[[str | None], Awaitable[CounterProgram | NoCounter]]"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What only the engine knows, or the user of a file.

    ``model`` and ``endpoint``: what every line must name; None: one model, any endpoint.
    ``deduplicates``: identical deterministic requests run once. ``any_body``: the file is the
    operator's own, and no field or URL in its bodies is refused. ``of_client``: a client of the
    API has sent it, so the limits on the size of a file apply. ``offer``: what engines serve.
    """

    model: str | None = None
    endpoint: str | None = None
    deduplicates: bool = False
    any_body: bool = False
    of_client: bool = False
    offer: Offer = ANYTHING
    bytes_per_token: float = float(BYTES_PER_TOKEN)
    shape: CacheShape = field(default_factory=lambda: CacheShape(blocks=6250))


@dataclass(frozen=True, slots=True)
class OrderEstimate:
    """The simulated part. ``gain``: the time in the file's order divided by that in ours."""

    ours: Reuse
    as_written: Reuse
    ceiling: Reuse
    gain: float
    simulated_requests: int
    """Requests simulated in each order; fewer than there are where the file is large."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of the good lines. ``order`` is None where there are none; ``model`` is that of
    the lines.

    ``output_tokens`` are as many as such answers had, for ``learned_requests``; for the others, as
    many as they allow.

    ``planned_tokens`` are prompts and answers as the plan counts them, ``planned_work`` the same in
    tokens of answers, with ``planned_prompts`` of prompts: what rates are measured in.
    """

    model: str | None
    requests: int
    copies: int
    """The number of ``requests`` that another one's answer serves; all the rest is without them."""
    prompt_tokens: int
    output_tokens: int
    learned_requests: int
    planned_tokens: int
    planned_work: float
    planned_prompts: float
    order: OrderEstimate | None
    errors: tuple[BatchError, ...]
    """The first thousand errors of the file."""
    bad_lines: int = 0
    deep: DeepFindings | None = None
    """What a deep validation has counted, of all good lines; None: it was a basic one."""
    fields: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """How many good lines have each field, by endpoint."""


async def estimate_file(
    settings: Settings,
    location: Location,
    assumptions: Assumptions,
    find_lengths: Callable[[str], Awaitable[KnownLengths]] = nothing_learned,
    find_counter: FindCounter | None = None,
) -> Estimate:
    """Validate, plan and simulate. Raises :class:`~batchyard.errors.StorageError`.

    ``find_lengths``: what is known of how long a model's answers are. Raises what it raises.
    ``find_counter``: what counts a model's prompts in a deep validation; None: it is a basic one.
    """
    folder = Path(tempfile.mkdtemp(prefix="batchyard-estimate-"))
    try:
        limits = settings.limits.to_limits(of_client=assumptions.of_client)
        path = await _local_path(settings, location, folder, limits.max_bytes)
        with os_errors_as_ours(str(location)):
            counter = None
            if find_counter is not None:
                most = settings.limits.max_line_bytes
                named = assumptions.model or await in_thread(first_model, path, most)
                counter = await find_counter(
                    None if named is None else assumptions.offer.model_of(named)
                )
            stopping = threading.Event()
            reading = partial(
                _read, settings, path, folder, assumptions, counter, stopping=stopping
            )
            read = await in_executor(None, reading, interrupt=stopping.set)
            known = await find_lengths(read.model) if read.model else (LengthHistory(), b"")
            return await in_thread(_estimate, read, folder, known, assumptions)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


async def _local_path(
    settings: Settings, location: Location, folder: Path, limit_bytes: int
) -> Path:
    if isinstance(location, LocalFile):
        with os_errors_as_ours(str(location)):
            if await in_thread(_may_be_read_there, location.path, limit_bytes):
                return location.path
    # Whatever is wrong with it is said here, as for a batch.
    path = folder / "input"
    access = access_with(settings)
    await write_file(path, read_location(location, limit_bytes=limit_bytes, access=access))
    return path


def _may_be_read_there(path: Path, limit_bytes: int) -> bool:
    if not path.is_file() or path.stat().st_size > limit_bytes:
        return False
    with path.open("rb") as file:
        return not is_packed(file.read(MAGIC_BYTES))


@dataclass(frozen=True, slots=True)
class _Read:
    planner: Planner
    model: str | None
    errors: tuple[BatchError, ...]
    bad_lines: int
    deep: DeepFindings | None
    fields: Mapping[str, Mapping[str, int]]


def _read(
    settings: Settings,
    path: Path,
    folder: Path,
    assumptions: Assumptions,
    counter: CounterProgram | NoCounter | None,
    *,
    stopping: threading.Event,
) -> _Read:
    """Raises :class:`InterruptedError` once it is ``stopping``, in a deep validation."""
    validator = Validator(_rules(settings, assumptions), spool=folder)
    planner = Planner(
        order="prefix",
        spool=folder,
        chunk_requests=settings.chunk_requests,
        deduplicates=assumptions.deduplicates,
    )
    fields = FieldCounts()
    errors: tuple[BatchError, ...] = ()

    def go_on() -> None:
        if stopping.is_set():
            raise InterruptedError

    deep = None
    with path.open("rb") as file, ExitStack() as opened:
        lines = validator.lines(file)
        if counter is not None:
            deep = DeepValidation(validator, counter, opened, go_on)
            lines = deep.lines(lines)
        for line in lines:
            planner.add(line)
            fields.count(line.url, line.body)
        try:
            validator.finish(file)
        except InputRefused as refused:
            errors = refused.entries
    findings = None if deep is None else deep.findings
    return _Read(
        planner, validator.model, errors, validator.bad_lines, findings, fields.by_endpoint()
    )


def _rules(settings: Settings, assumptions: Assumptions) -> Rules:
    limits = settings.limits.to_limits(of_client=assumptions.of_client)
    return Rules(
        endpoint=assumptions.endpoint,
        models=frozenset({assumptions.model}) if assumptions.model else None,
        offer=assumptions.offer,
        limits=replace(limits, max_reported_errors=_REPORTED_ERRORS),
        policy=None if assumptions.any_body else settings.bodies.to_policy(),
    )


def _estimate(read: _Read, folder: Path, known: KnownLengths, assumptions: Assumptions) -> Estimate:
    with (folder / "plan").open("wb") as plan_file:
        summary = read.planner.write(plan_file, *known)
    records = read_records((folder / "plan").read_bytes())
    return _estimate_plan(records, summary, read, assumptions)


def _estimate_plan(
    records: npt.NDArray[Any],
    summary: PlanSummary,
    read: _Read,
    assumptions: Assumptions,
) -> Estimate:
    # Chunks are cut from the records in their order, so that this is the order of execution.
    runs = records[records["prompt_tokens"] > 0]
    assumptions = _measured(assumptions, int(runs["prompt_tokens"].sum()), summary, read.deep)
    by_prefix = runs[np.argsort(runs["rank"])]
    prompt_tokens = np.maximum(
        1, by_prefix["prompt_tokens"] * (BYTES_PER_TOKEN / assumptions.bytes_per_token)
    ).astype(np.int64)
    shared_tokens = (by_prefix["shared_bytes"] / assumptions.bytes_per_token).astype(np.int64)
    order = None
    if len(runs):
        order = _estimate_order(
            prompt_tokens,
            shared_tokens,
            by_prefix["output_tokens"],
            ours=np.searchsorted(by_prefix["rank"], runs["rank"]),
            as_written=np.argsort(by_prefix["ordinal"]),
            shape=assumptions.shape,
        )
    return Estimate(
        deep=read.deep,
        model=read.model,
        requests=summary.requests,
        copies=summary.copies,
        prompt_tokens=int(prompt_tokens.sum()),
        output_tokens=summary.output_tokens,
        learned_requests=summary.learned_requests,
        planned_tokens=summary.prompt_tokens + summary.output_tokens,
        planned_work=summary.prompt_work + summary.output_tokens,
        planned_prompts=summary.prompt_work / PROMPT_WORK,
        order=order,
        errors=read.errors,
        bad_lines=read.bad_lines,
        fields=read.fields,
    )


def _measured(
    assumptions: Assumptions, planned_tokens: int, summary: PlanSummary, deep: DeepFindings | None
) -> Assumptions:
    """With the bytes of a token that these prompts have, if all of them were counted."""
    if deep is None or deep.uncounted or summary.copies or not deep.prompt_tokens:
        return assumptions
    prompt_bytes = planned_tokens * BYTES_PER_TOKEN
    return replace(assumptions, bytes_per_token=prompt_bytes / deep.prompt_tokens)


def _estimate_order(
    prompt_tokens: npt.NDArray[np.int64],
    shared_tokens: npt.NDArray[np.int64],
    output_tokens: npt.NDArray[np.uint32],
    *,
    ours: npt.NDArray[Any],
    as_written: npt.NDArray[Any],
    shape: CacheShape,
) -> OrderEstimate:
    """Every array but the two orders is in prefix order."""
    tree = prefix_tree(prompt_tokens, shared_tokens, shape.block_tokens)
    prompts, outputs = prompt_tokens.tolist(), output_tokens.tolist()
    first, second = (
        simulate(tree, _sample(order).tolist(), prompts, outputs, shape)
        for order in (ours, as_written)
    )
    return OrderEstimate(
        ours=first.reuse,
        as_written=second.reuse,
        ceiling=ceiling(tree, prompt_tokens, shape.block_tokens),
        gain=second.cost / first.cost,
        simulated_requests=min(len(ours), _SIMULATED_REQUESTS),
    )


def _sample(order: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The whole order, or pieces from all over it: neighbours stay neighbours."""
    if len(order) <= _SIMULATED_REQUESTS:
        return order
    size = _SIMULATED_REQUESTS // _PIECES
    starts = np.linspace(0, len(order) - size, _PIECES).astype(int)
    return np.concatenate([order[start : start + size] for start in starts])
