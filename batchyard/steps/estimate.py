"""Estimate: what running a file would take, without an engine. It changes nothing.

It is validated and planned as a batch would be, in a folder of its own; a simulated prefix cache
says what the order of its requests is worth.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchyard.cache import CacheShape, Reuse, ceiling, prefix_tree, simulate
from batchyard.errors import InputRefused
from batchyard.lines import Rules, Validator
from batchyard.plan import BYTES_PER_TOKEN, Planner, PlanSummary, read_records
from batchyard.services.services import access_with
from batchyard.storage.file import os_errors_as_ours, write_file
from batchyard.storage.local_file import LocalFile
from batchyard.storage.location import read_location
from batchyard.store import open_store
from batchyard.threads import in_thread

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchyard.batch_error import BatchError
    from batchyard.settings import Settings
    from batchyard.storage.access import Location
    from batchyard.store import RateRecord

_REPORTED_ERRORS = 1000
_SIMULATED_REQUESTS = 200_000
"""Of a longer file, only a sample: this many take about a second in each order."""
_PIECES = 8
_STORE_PATIENCE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What only the engine knows, or the user of a file.

    ``model`` and ``endpoint``: what every line must name; None: one model, any endpoint.
    ``deduplicates``: identical deterministic requests run once. ``any_body``: the file is the
    operator's own, and no field or URL in its bodies is refused.
    """

    model: str | None = None
    endpoint: str | None = None
    deduplicates: bool = False
    any_body: bool = False
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
    """Of the good lines. ``order`` is None where there are none; ``model`` is that of the lines.

    ``planned_tokens`` are prompts and answers as the plan counts them, which is what rates are
    measured in.
    """

    model: str | None
    requests: int
    copies: int
    """Of ``requests``: those that another one's answer serves; all the rest is without them."""
    prompt_tokens: int
    output_tokens: int
    planned_tokens: int
    order: OrderEstimate | None
    errors: tuple[BatchError, ...]


async def estimate_file(
    settings: Settings, location: Location, assumptions: Assumptions
) -> Estimate:
    """Validate, plan and simulate. Raises :class:`~batchyard.errors.StorageError`."""
    folder = Path(tempfile.mkdtemp(prefix="batchyard-estimate-"))
    try:
        path = await _local_path(settings, location, folder)
        with os_errors_as_ours(str(location)):
            return await in_thread(_estimate, settings, path, folder, assumptions)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


async def measured_rate(settings: Settings, model: str) -> RateRecord | None:
    """How fast the model was seen to run; None where there is no database, or nothing in it.

    It creates no database and changes none. Raises :class:`~batchyard.errors.StoreError`.
    """
    url = settings.database
    if url.startswith("sqlite:///") and not await in_thread(
        Path(url.removeprefix("sqlite:///")).exists
    ):
        return None
    async with open_store(url, patience_seconds=_STORE_PATIENCE_SECONDS) as store:
        return await store.rates.get(model, settings.pool_of(model))


async def _local_path(settings: Settings, location: Location, folder: Path) -> Path:
    limit_bytes = settings.limits.max_bytes
    if isinstance(location, LocalFile):
        with os_errors_as_ours(str(location)):
            if location.path.is_file() and location.path.stat().st_size <= limit_bytes:
                return location.path
    # Whatever is wrong with it is said here, as for a batch.
    path = folder / "input"
    access = access_with(settings)
    await write_file(path, read_location(location, limit_bytes=limit_bytes, access=access))
    return path


def _estimate(settings: Settings, path: Path, folder: Path, assumptions: Assumptions) -> Estimate:
    limits = replace(settings.limits.to_limits(), max_reported_errors=_REPORTED_ERRORS)
    models = frozenset({assumptions.model}) if assumptions.model else None
    policy = None if assumptions.any_body else settings.bodies.to_policy()
    validator = Validator(
        Rules(endpoint=assumptions.endpoint, models=models, limits=limits, policy=policy)
    )
    planner = Planner(
        order="prefix",
        spool=folder,
        chunk_requests=settings.chunk_requests,
        deduplicates=assumptions.deduplicates,
    )
    errors: tuple[BatchError, ...] = ()
    with path.open("rb") as file:
        for line in validator.lines(file):
            planner.add(line)
        try:
            validator.finish(file)
        except InputRefused as refused:
            errors = refused.entries
    with (folder / "plan").open("wb") as plan_file:
        summary = planner.write(plan_file)
    return _estimate_plan(
        read_records((folder / "plan").read_bytes()), summary, validator.model, errors, assumptions
    )


def _estimate_plan(
    records: npt.NDArray[Any],
    summary: PlanSummary,
    model: str | None,
    errors: tuple[BatchError, ...],
    assumptions: Assumptions,
) -> Estimate:
    # Chunks are cut from the records in their order, so that this is the order of execution.
    runs = records[records["prompt_tokens"] > 0]
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
            np.searchsorted(by_prefix["rank"], runs["rank"]),
            np.argsort(by_prefix["ordinal"]),
            assumptions.shape,
        )
    return Estimate(
        model=model,
        requests=summary.requests,
        copies=summary.copies,
        prompt_tokens=int(prompt_tokens.sum()),
        output_tokens=summary.output_tokens,
        planned_tokens=summary.prompt_tokens + summary.output_tokens,
        order=order,
        errors=errors,
    )


def _estimate_order(
    prompt_tokens: npt.NDArray[np.int64],
    shared_tokens: npt.NDArray[np.int64],
    output_tokens: npt.NDArray[np.uint32],
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
