"""Reads one input: checks its lines, sorts its requests, writes the plan. Blocking.

What a reader is asked for and what it finds can be pickled, because a large input is read by a
process of its own (:mod:`.reader_process`). So nothing of the database or of Prefect is here: a
process that imports them starts late and is large.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from batchyard.batch_error import with_its_file
from batchyard.errors import InputRefused
from batchyard.lines.body_fields import FieldCounts
from batchyard.lines.duplicates import duplicate_lines
from batchyard.lines.lines import Validator
from batchyard.plan.planner import Planner
from batchyard.services.defects import defects_as_ours
from batchyard.steps.prepare.deep_validation import DeepValidation
from batchyard.steps.prepare.refused_lines import RefusedLines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from batchyard.batch_error import BatchError, InputPart
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.lines.rules import Rules
    from batchyard.plan.lengths import LengthHistory
    from batchyard.plan.planner import PlanSummary
    from batchyard.services.segments.answered_lines import WrittenLines
    from batchyard.steps.prepare.deep_validation import DeepFindings, NoCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob:
    """What is read, and how. ``folder`` is for the plan, the bad lines and the runs of the sort.

    ``parts``: the files that the input consists of. ``leaves_out``: bad lines do not refuse the
    file. ``order``, ``chunk_requests`` and ``deduplicates`` are those of a :class:`.Planner`.
    """

    batch_id: str
    input_path: Path
    folder: Path
    parts: tuple[InputPart, ...]
    leaves_out: bool
    order: str
    chunk_requests: int
    deduplicates: bool


@dataclass(frozen=True, slots=True)
class Check:
    """The order to check all lines. ``counter``: what counts the prompts of a deep validation, or
    why nothing does; None: it is a basic one."""

    rules: Rules
    counter: CounterProgram | NoCounter | None


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The order to write the plan, as :meth:`.Planner.write` does."""

    history: LengthHistory
    secret: bytes
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Validated:
    """An input whose batch runs. ``model`` is the one that its good lines name; None: it has none.
    ``adapters`` are those of the model that they name.

    ``endpoints``: each that a good line names, with the number of the first such line.

    ``requests`` are all lines, ``left_out`` those of them that are left out because they are bad;
    None: a bad line refuses the file. ``deep``: what a deep validation has counted; None: it was a
    basic one. ``refusal``: why the batch shall not run; ``strays``: the names of other models in
    its lines.
    """

    model: str | None
    requests: int
    size_bytes: int
    endpoints: Mapping[str, int]
    left_out: WrittenLines | None = None
    deep: DeepFindings | None = None
    adapters: tuple[str, ...] = ()
    strays: frozenset[str] = frozenset()
    fields: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """How many good lines have each field, by endpoint."""
    refusal: tuple[BatchError, ...] = ()

    @property
    def refused(self) -> int:
        """How many lines are left out."""
        return 0 if self.left_out is None else self.left_out.count


class InputReader:
    """One input. Its methods raise ``OSError``, ``MemoryError`` and
    :class:`~batchyard.errors.UnexpectedError`."""

    def __init__(self, job: ReadingJob) -> None:
        self._job = job
        self._checked: Check
        self._planner: Planner | None = None
        """What the last check has sorted, until a plan is written of it."""

    def check(self, order: Check, go_on: Callable[[], object]) -> Validated:
        """Check every line in one pass over the input, which also sorts the requests.

        ``go_on`` is called often, and may raise :class:`InterruptedError`.
        """
        self._checked, self._planner = order, None
        with defects_as_ours("validating and planning the input"):
            found, self._planner = self._check(order, go_on)
        return found

    def write_plan(self, order: WritePlan) -> PlanSummary:
        """Write the file ``plan`` of what :meth:`check` has read. After an error, read it again."""
        with defects_as_ours("validating and planning the input"):
            planner, self._planner = self._planner, None
            if planner is None:
                # The write that failed has taken requests out of the sort.
                _, planner = self._check(self._checked, lambda: None)
            with (self._job.folder / "plan").open("wb") as file:
                return planner.write(file, order.history, order.secret, cache_salt=order.cache_salt)

    def _check(self, order: Check, go_on: Callable[[], object]) -> tuple[Validated, Planner]:
        planner = self._new_planner()
        endpoints: dict[str, int] = {}
        adapters: set[str] = set()
        fields = FieldCounts()
        with self._job.input_path.open("rb") as file, ExitStack() as opened:
            left_out = self._left_out(opened)
            validator = self._validator(file, order.rules, left_out, go_on)
            lines, deep = validator.lines(file), None
            if order.counter is not None:
                deep = DeepValidation(validator, order.counter, opened, go_on)
                lines = deep.lines(lines)
            for line in lines:
                go_on()
                if not validator.has_errors:
                    planner.add(line)
                    fields.count(line.url, line.body)
                if line.url not in endpoints:
                    endpoints[line.url] = line.number
                if line.adapter:
                    adapters.add(line.adapter)
            refusal = self._refusal(validator, file)
        found = Validated(
            # Without a good line there is none whose model counts.
            validator.model if endpoints else None,
            validator.requests,
            self._job.input_path.stat().st_size,
            endpoints,
            left_out=None if left_out is None else left_out.written(),
            deep=None if deep is None else deep.findings,
            adapters=tuple(sorted(adapters)),
            strays=frozenset(validator.strays),
            fields=fields.by_endpoint(),
            refusal=refusal,
        )
        return found, planner

    def _new_planner(self) -> Planner:
        return Planner(
            order=self._job.order,
            spool=self._job.folder,
            chunk_requests=self._job.chunk_requests,
            deduplicates=self._job.deduplicates,
        )

    def _left_out(self, opened: ExitStack) -> RefusedLines | None:
        job = self._job
        if not job.leaves_out:
            return None
        return opened.enter_context(RefusedLines(job.batch_id, job.parts, job.folder))

    def _validator(
        self,
        file: BinaryIO,
        rules: Rules,
        left_out: RefusedLines | None,
        go_on: Callable[[], object],
    ) -> Validator:
        spool = self._job.folder
        if left_out is None:
            return Validator(rules, spool=spool)
        duplicates = frozenset(duplicate_lines(file, rules.limits, go_on, spool=spool))
        return Validator(rules, leave_out=left_out.refuse, duplicates=duplicates)

    def _refusal(self, validator: Validator, file: BinaryIO) -> tuple[BatchError, ...]:
        try:
            validator.finish(file)
        except InputRefused as refused:
            return tuple(with_its_file(each, self._job.parts) for each in refused.entries)
        return ()
