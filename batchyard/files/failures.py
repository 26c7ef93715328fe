"""The failed lines of a batch, grouped by their code, and answers to look at.

While it runs, both come from the newest segments, which do not know the numbers of lines: they
count neither blank lines nor bad ones that were left out. That is not all of a large batch, and the
page says so. Afterwards the batch's row has the counts of all failed lines, and messages, names and
answers come from the first megabytes of its files.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from batchyard.errors import ObjectNotFound, RecordNotFound, StorageError
from batchyard.lifecycle import TERMINAL
from batchyard.lines.framing import custom_id_of, read_lines
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_thread
from batchyard.results.line_errors import error_of
from batchyard.results.results import LineHead, Outcome, head_of
from batchyard.services.keys import chunk_prefix
from batchyard.services.segments.segments import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.batch_error import BatchError
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

MOST_BYTES: Final = 4 * 1024**2
_INPUT_BYTES: Final = 16 * 1024**2
"""How many bytes of the input are searched for line numbers: this takes a fraction of a second."""
_MOST_LINES: Final = 12
_MOST_SEGMENTS: Final = 24
_SEGMENT_BYTES: Final = 1024**2
_ANSWERS: Final = 5
_MOST_TEXT_CHARS: Final = 2_000
_UNKNOWN: Final = LineHead("", -1)
_TURNS: Final = TenantTurns(4)
"""Each has up to 50 MB, and a tenant may look at hundreds of batches at once."""
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class FailedLine:
    """``number`` counts from 1, blank lines too; None: it is not known.

    The line is then further into the file than is searched, or its batch still runs.
    """

    custom_id: str
    number: int | None


@dataclass(slots=True)
class Group:
    """Lines that failed with the same code, or a file's errors of one code."""

    code: str
    sample: str
    count: int = 0
    lines: list[FailedLine] = field(default_factory=list)
    more: int = 0
    """How many lines are not named."""
    _last: FailedLine | None = None

    def add(self, line: FailedLine | None) -> None:
        """One more. A line with several errors in a row is named once."""
        self.count += 1
        if line is None or line == self._last:
            return
        self._last = line
        if len(self.lines) < _MOST_LINES:
            self.lines.append(line)
        else:
            self.more += 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, or its JSON where it has no text."""

    custom_id: str
    text: str
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """``is_partial``: there is more in the batch than was looked at."""

    groups: list[Group] = field(default_factory=list)
    is_partial: bool = False
    answers: list[Answer] = field(default_factory=list)


async def find(services: Services, batch: BatchRecord) -> Findings:
    """Failed lines and answers of the batch. Files that no longer exist are left out."""
    if batch.errors and not batch.in_progress_at:
        return Findings(grouped_refusals(batch.errors))
    async with _TURNS.turn(batch.tenant):
        try:
            if batch.status in TERMINAL:
                return await _of_files(services, batch)
            return await _of_segments(services, batch)
        except (StorageError, ValueError, RecursionError):
            # It cannot be read now, or is damaged.
            return Findings(_with_all_counts([], batch))


async def errors_by_code(services: Services, batch: BatchRecord) -> list[Group]:
    """Why its lines failed. While the batch runs: the newest of them, see :func:`find`."""
    if batch.status not in TERMINAL:
        return (await find(services, batch)).groups if batch.failed else []
    lines: list[bytes] = []
    if batch.options.error_counts:
        with suppress(StorageError):
            lines = (await _head_of(services, batch.error_file_id, MOST_BYTES)).lines
    groups = await in_thread(_grouped, [(line, None) for line in lines])
    return _with_all_counts(groups, batch)


def grouped_refusals(errors: Iterable[BatchError]) -> list[Group]:
    """Why a file was or would be refused, by code."""
    groups: dict[str, Group] = {}
    for error in errors:
        group = groups.setdefault(error.code, Group(error.code, error.message))
        group.add(None if error.line is None else FailedLine("", error.line))
    return _sorted(groups.values())


async def _of_files(services: Services, batch: BatchRecord) -> Findings:
    errors = await _head_of(services, batch.error_file_id, MOST_BYTES)
    groups: list[Group] = []
    counts = batch.options.error_counts
    if errors.data:
        source = await _head_of(services, batch.input_file_id, _INPUT_BYTES)
        # In a thread: it takes a fraction of a second, in which others want answers.
        groups = await in_thread(_groups_in, errors.lines, source.data)
    output = await _head_of(services, batch.output_file_id, _SEGMENT_BYTES // 4)
    answers = [_answer(line) for line in output.lines[:_ANSWERS]]
    return Findings(_with_all_counts(groups, batch), errors.is_cut and not counts, answers)


def _with_all_counts(groups: list[Group], batch: BatchRecord) -> list[Group]:
    """With the counts of all lines, where the batch has them: ``groups`` are of the first ones."""
    if not batch.options.error_counts:
        return groups
    found = {group.code: group for group in groups}
    return [
        replace(
            found.get(each.code, Group(each.code, "")),
            count=each.count,
            more=each.count - len(found[each.code].lines) if each.code in found else 0,
        )
        for each in batch.options.error_counts
    ]


class _Head(NamedTuple):
    """The beginning of a file. ``is_cut``: there is more of it."""

    data: bytes = b""
    is_cut: bool = False

    @property
    def lines(self) -> list[bytes]:
        """The whole lines, without blank ones."""
        lines = self.data.split(b"\n")
        return [line for line in (lines[:-1] if self.is_cut else lines) if line.strip()]


async def _head_of(services: Services, file_id: str | None, most_bytes: int) -> _Head:
    """Nothing of a file that was deleted, or that the batch does not have."""
    if file_id is None:
        return _Head()
    try:
        file = await services.store.files.get(file_id)
        stop = min(file.size_bytes, most_bytes)
        data = await read_object(services.storage, file.storage_key, stop=stop)
    except (RecordNotFound, ObjectNotFound):
        return _Head()
    return _Head(data, stop < file.size_bytes)


def _groups_in(errors: list[bytes], source: bytes) -> list[Group]:
    return _grouped(zip(errors, _numbers(errors, source), strict=True))


def _numbers(errors: list[bytes], source: bytes) -> list[int | None]:
    """The numbers of the lines, as far as the beginning of the input has them.

    Those that were left out know how many requests were before theirs. They may have no name, or
    that of another line: of several with one name, the first is the one that has run.
    """
    heads = [_line_head(line) for line in errors]
    names = {head.name for head in heads if head.refused is None}
    ordinals = {head.refused for head in heads}
    by_name: dict[str, int] = {}
    by_ordinal: dict[int, int] = {}
    for ordinal, line in enumerate(read_lines(BytesIO(source), len(source))):
        if ordinal in ordinals:
            by_ordinal[ordinal] = line.number
        if (custom_id := custom_id_of(line.data or b"")) in names:
            by_name.setdefault(custom_id, line.number)
    return [
        by_name.get(head.name) if head.refused is None else by_ordinal.get(head.refused)
        for head in heads
    ]


def _line_head(line: bytes) -> LineHead:
    try:
        return head_of(line)
    except ValueError:
        return _UNKNOWN


async def _of_segments(services: Services, batch: BatchRecord) -> Findings:
    # NumPy takes a tenth of the time in which any command starts.
    from batchyard.services.segments.segment_headers import decode_headers  # noqa: PLC0415 - see above

    failing, newest = await services.store.overview.chunks_to_see(batch.id)
    errors: list[bytes] = []
    answers: list[bytes] = []
    budget = _MOST_SEGMENTS
    for index in dict.fromkeys([*failing, *newest]):
        keys = [key async for key in services.storage.list(chunk_prefix(batch.id, index))]
        for key in sorted(keys, reverse=True)[:budget]:
            budget -= 1
            data = await read_object(services.storage, key, stop=_SEGMENT_BYTES)
            found = decode_headers(data)
            for outcome, line in zip(found.headers["outcome"], found.lines(), strict=True):
                if outcome == Outcome.ERROR:
                    errors.append(line)
                elif index in newest:
                    answers.append(line)
    groups = await in_thread(_grouped, [(line, None) for line in errors])
    return Findings(
        groups, len(errors) < batch.failed, [_answer(line) for line in answers[-_ANSWERS:]]
    )


def _grouped(lines: Iterable[tuple[bytes, int | None]]) -> list[Group]:
    groups: dict[str, Group] = {}
    for line, number in lines:
        code, message = error_of(line)
        group = groups.setdefault(code, Group(code, message[:_MOST_TEXT_CHARS]))
        group.add(FailedLine(custom_id_of(line), number))
    return _sorted(groups.values())


def _sorted(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (-group.count, group.code))


def _answer(line: bytes) -> Answer:
    text = _text_of(_decode(line))
    return Answer(custom_id_of(line), text[:_MOST_TEXT_CHARS], len(text) > _MOST_TEXT_CHARS)


def _text_of(line: Any) -> str:
    body: Any = (line.get("response") or {}).get("body")
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if isinstance(text, str):
            return text
    except (KeyError, IndexError, TypeError):
        pass
    return msgspec.json.format(msgspec.json.encode(body), indent=1).decode()
