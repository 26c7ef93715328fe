"""Write the ledger: a row for each line that the segments of a batch have, in the input's order.

It has the file of a result, but no list shows it, and what reads it adds what no line used: see
:mod:`batchyard.files.read_ledger`.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from batchyard.processes.in_order import in_order
from batchyard.processes.threads import in_executor
from batchyard.results.results import Outcome, is_refused
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import read_object
from batchyard.steps.collect.result_lines import ResultLines
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.batch.ledger import Charge
    from batchyard.storage.base import Storage

_READ_AT_ONCE = 4
"""Segments; each has sixteen mebibytes and a line, at most."""


@dataclass(frozen=True, slots=True)
class Charged:
    """The segments of one batch, in the order in which their lines count, and what they cost."""

    keys: Sequence[str]
    charge: Charge
    ordinals: npt.NDArray[np.uint32] | None = None
    """The request of the whole that each of its lines is of; None: it has all of them."""


class _LedgerLines(ResultLines):
    """Rows in place of the result lines, of the same lines."""

    async def add(self, charged: Charged, segment: bytes) -> None:
        """Take a segment's lines."""
        await in_executor(self._thread, partial(self._add_rows, charged, segment))

    def _add_rows(self, charged: Charged, segment: bytes) -> None:
        ordinals = charged.ordinals
        requests = len(self._has_line) if ordinals is None else len(ordinals)
        found = decode_headers(segment, requests)
        if ordinals is not None:
            found.headers["ordinal"] = ordinals[found.headers["ordinal"]]
        new = found.pick(self._is_new(found.headers["ordinal"]))
        rows = [
            _row(charged.charge, header, line, is_copy=is_copy)
            for header, line, is_copy in zip(
                new.headers.tolist(), new.lines(), new.is_copy.tolist(), strict=True
            )
        ]
        self._count(new)
        as_output = np.full(len(rows), Outcome.OUTPUT, dtype=np.uint8)
        self._take(new.headers["ordinal"], as_output, rows)


def _row(charge: Charge, header: tuple[Any, ...], line: bytes, *, is_copy: bool) -> bytes:
    ordinal, _, counts, _ = header
    if is_refused(line):
        # Nobody has read which model it names.
        charge = replace(charge, model=None)
    return charge.row(ordinal, line, TokenUsage(*counts.tolist()), is_copy=is_copy).to_line()


async def ledger_parts(
    storage: Storage,
    folder: Path,
    total: int,
    groups: Sequence[Sequence[Charged]],
    count: Callable[[TokenUsage], None],
) -> AsyncGenerator[bytes]:
    """The rows of a batch of ``total`` requests, joined: one group after the other.

    A request has one row in each group at most. ``count`` gets the tokens of each group. Raises
    :class:`~batchyard.errors.StorageError`, and ``OSError`` of ``folder``.
    """
    for group in groups:
        with _LedgerLines(folder, total) as lines:
            for charged in group:
                await _add_all(storage, lines, charged)
            count(lines.usage)
            async with aclosing(lines.parts(Outcome.OUTPUT)) as parts:
                async for part in parts:
                    yield part


async def _add_all(storage: Storage, lines: _LedgerLines, charged: Charged) -> None:
    async def reads() -> AsyncGenerator[Any]:
        for key in charged.keys:
            yield read_object(storage, key)

    async with aclosing(in_order(reads(), at_once=_READ_AT_ONCE)) as segments:
        async for segment in segments:
            await lines.add(charged, segment)
