"""The deep checks of an input, between the validator and the plan ([60]).

Lines pass through in their order. What is found in one makes it a bad line like any other. Prompts
are counted by a process of the engine's environment. Where there is none, or it fails, lines are
checked without it, and the result says why.

[60]: docs/adr/0060-deep-validation.md
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.batch.batch_options import Validation
from batchyard.engine.prompt_counting.counter import (
    COUNTED_ENDPOINTS,
    Count,
    CountedRequest,
    CounterProgram,
    PromptCounter,
)
from batchyard.errors import BatchyardError
from batchyard.lines.deep_checks import context_refusals
from batchyard.lines.framing import read_lines
from batchyard.lines.lines import Validator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from batchyard.engine.base import Engine
    from batchyard.lines.lines import BadLine, RequestLine
    from batchyard.lines.rules import Rules
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_LINES_AT_ONCE: Final = 512
_BYTES_AT_ONCE: Final = 1 << 20
_FIRST_LINES: Final = 1000
NO_COUNTER: Final = "its engine is a server that runs already, with its own tokenizer"


@dataclass(frozen=True, slots=True)
class NoCounter:
    """Why prompts are not counted, as the end of a sentence."""

    why: str


@dataclass(slots=True)
class DeepFindings:
    """What a deep validation has counted. ``prompt_tokens`` are of the ``counted`` good lines.

    ``uncertain``: those of them that have more, because they hold media or tools. ``why_not``: why
    nothing was counted, or not all; empty: it was.
    """

    prompt_tokens: int = 0
    counted: int = 0
    uncertain: int = 0
    uncounted: int = 0
    max_model_len: int | None = None
    why_not: str = ""
    unchecked: int = 0
    """Good lines that were not given to the engine's own rules."""


def is_deep(services: Services, batch: BatchRecord) -> bool:
    """Whether the batch asks for it, or the operator does for all that clients wait for."""
    if batch.is_hidden:
        # Clients of responses wait for seconds, and the start of a counter takes some. A chain has
        # many parts, and nothing but its last stage waits for a line that the engine refuses.
        return False
    wanted = {batch.options.validation, services.settings.validation}
    return Validation.DEEP in wanted


async def find_counter(
    engine_for: Callable[[str], Any], model: str | None
) -> CounterProgram | NoCounter:
    """What counts the prompts of a model here; it raises nothing."""
    if model is None:
        return NoCounter("no line names a model")
    try:
        engine: Engine = await engine_for(model)
    except BatchyardError as error:
        return NoCounter(str(error).rstrip("."))
    return engine.prompt_counter or NoCounter(NO_COUNTER)


def first_model(path: Path, max_line_bytes: int) -> str | None:
    """The model that the first line of the file names; None: the first thousand name none."""
    with path.open("rb") as file:
        for line in islice(read_lines(file, max_line_bytes), _FIRST_LINES):
            try:
                found = msgspec.json.decode(line.data or b"", type=_NamesModel)
            except (ValueError, RecursionError):
                continue
            return found.body.model
    return None


def first_good_model(path: Path, rules: Rules) -> str | None:
    """The model of the first line that is good by the rules; None: none of the first thousand is.

    A batch that leaves bad lines out is of this model, whatever they name.
    """

    def count(bad: BadLine) -> None:
        if bad.ordinal + 1 >= _FIRST_LINES:
            raise _NoneIsGood

    validator = Validator(rules, leave_out=count)
    with path.open("rb") as file, suppress(_NoneIsGood):
        for _ in validator.lines(file):
            return validator.model
    return None


class _NoneIsGood(Exception):
    """None of the first lines is good."""


class _Body(msgspec.Struct):
    model: str


class _NamesModel(msgspec.Struct):
    body: _Body


class DeepValidation:
    """The deep checks of one input. ``program``: what counts its prompts, or why nothing does.

    The counter's process lives as long as what is ``opened``. ``go_on`` is called often while it
    works, and may raise :class:`InterruptedError`.
    """

    def __init__(
        self,
        validator: Validator,
        program: CounterProgram | NoCounter,
        opened: ExitStack,
        go_on: Callable[[], object],
    ) -> None:
        self._validator = validator
        self._counter: PromptCounter | None = None
        self.findings = DeepFindings()
        if isinstance(program, CounterProgram):
            self._counter = opened.enter_context(PromptCounter(program, go_on))
            self.findings.max_model_len = self._counter.max_model_len
        else:
            self.findings.why_not = program.why

    def lines(self, lines: Iterator[RequestLine]) -> Iterator[RequestLine]:
        """Those of the ``lines`` in which nothing is found; the validator learns of the others.

        While some are counted, the next ones are read.
        """
        sent: list[RequestLine] = []
        for batch in _batched(lines):
            yield from self._counted(sent)
            self._send(batch)
            sent = batch
        yield from self._counted(sent)
        if self._counter is not None:
            self.findings.why_not = self._counter.why_not

    def _send(self, batch: list[RequestLine]) -> None:
        if self._counter is not None:
            # Of another endpoint nothing would be known.
            self._counter.send(
                [
                    CountedRequest(line.url, line.body if line.url in COUNTED_ENDPOINTS else {})
                    for line in batch
                ]
            )

    def _counted(self, batch: list[RequestLine]) -> Iterator[RequestLine]:
        counts: Iterable[Count] = [Count()] * len(batch)
        if self._counter is not None and batch:
            counts = self._counter.receive()
        for line, count in zip(batch, counts, strict=True):
            context = self.findings.max_model_len
            too_long = context_refusals(line.url, line.body, count.longest, context)
            if refusals := [*too_long, *(count.refusals or ())]:
                self._validator.refuse(line, refusals)
                continue
            self._note(count)
            yield line

    def _note(self, count: Count) -> None:
        findings = self.findings
        findings.unchecked += count.refusals is None
        if count.tokens is None:
            findings.uncounted += 1
            return
        findings.counted += 1
        findings.prompt_tokens += count.tokens
        findings.uncertain += not count.is_exact


def _batched(lines: Iterator[RequestLine]) -> Iterator[list[RequestLine]]:
    """Lists of so many lines, or of fewer if they are long."""
    batch: list[RequestLine] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += line.length
        if len(batch) >= _LINES_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def findings_words(findings: DeepFindings) -> str:
    """``12,345 prompt tokens in 100 lines; 2 lines not counted: …``."""
    words = []
    if findings.counted:
        least = "at least " if findings.uncertain else ""
        lines = _lines_words(findings.counted)
        words.append(f"{least}{findings.prompt_tokens:,} prompt tokens in {lines}")
    if findings.uncounted:
        why = findings.why_not or "only the engine knows their prompts"
        words.append(f"{_lines_words(findings.uncounted)} not counted: {why}")
    if findings.unchecked:
        words.append(f"{_lines_words(findings.unchecked)} not checked by the engine's own rules")
    if findings.counted and findings.max_model_len is None:
        words.append("how long a prompt may be is not known for certain")
    return "; ".join(words)


def _lines_words(number: int) -> str:
    return "1 line" if number == 1 else f"{number:,} lines"
