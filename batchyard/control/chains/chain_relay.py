"""Hands the lines of a chain from stage to stage, and those at their end to its results.

The owner of the chain's batch does so while the batch runs. How far each line is follows from what
is durable: the parts' rows say which lines they hold, and the chain's segments which are at their
end. So the next owner goes on from there, and no line is lost or runs twice in a stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from batchyard import intervals
from batchyard.batch.chains import line_or_refusal, of_stage, variables_of
from batchyard.control.chains.chain_lines import Source, StageSegments, groups_of
from batchyard.control.chains.chain_parts import WaitingLines, inputs_of, make_part
from batchyard.control.chains.renderer import Renderer
from batchyard.control.stopping_runners import wait_for_stopping_runners
from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.lines.framing import custom_id_of
from batchyard.lines.templates import BodyNotMade
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.processes.beside import beside
from batchyard.processes.threads import in_thread
from batchyard.results.results import NoAnswerCode, Outcome, is_refused, of_made_request, unanswered
from batchyard.services.keys import results_prefix
from batchyard.services.segments.new_lines import new_segments
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.steps.collect.collect import DAMAGED, LISTED_AGAIN_SECONDS
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy.typing as npt

    from batchyard.batch.chains import Stage
    from batchyard.control.chains.chain_lines import FinishedLine
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

HAND_ON_SECONDS = 0.5
"""How often finished lines of a chain are handed to its next stage."""
_ENDED: Final = 255
"""In place of a stage: the line is in the chain's results."""


class _Readable(NamedTuple):
    """A line that goes on: what its request is made of."""

    ordinal: int
    custom_id: str
    variables: dict[str, Any]


class _Ended(NamedTuple):
    """A source of which nothing more will come."""

    part: BatchRecord | None
    """The part as it ended; None: it is the chain's own batch."""
    counted: int
    """How many of its lines were answered; they are in its segments."""


class ChainRelay:
    """One chain, under one lease of its batch. Made by :meth:`opened`."""

    def __init__(
        self, services: Services, chain: BatchRecord, stages: tuple[Stage, ...], epoch: int
    ) -> None:
        self._services = services
        self._chain = chain
        self._stages = stages
        self._epoch = epoch
        self._reached: npt.NDArray[np.uint8] = np.zeros(chain.counts.total, dtype=np.uint8)
        """The stage that each line is in, from 0."""
        everything = np.arange(chain.counts.total, dtype=np.uint32)
        self._first = Source(chain.id, chain.input_file_id, 0, everything)
        self._sources = [self._first]
        self._waiting = {
            n: WaitingLines.of_chain(services, chain, n) for n in range(1, len(stages) + 1)
        }
        self._drained: list[str] = []
        """Parts that are over, until that is recorded."""
        self._segments = {
            n: StageSegments(services.storage, chain.id, n, epoch)
            for n in range(2, len(stages) + 2)
        }
        self._counts = {Outcome.OUTPUT: 0, Outcome.ERROR: 0}
        self._recorded: object = None
        self._renderers: dict[int, Renderer] = {}
        self._is_closing = False
        self._at_end = contextlib.AsyncExitStack()
        self._folder: Path
        self.is_done = False
        """Every line is at its end, and that is recorded."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, services: Services, batch_id: str, epoch: int) -> AsyncIterator[Self]:
        """With what is durable already. Raises StoreError and StorageError."""
        chain = await services.store.batches.get(batch_id)
        record = await services.store.chains.get(batch_id)
        relay = cls(services, chain, record.stages, epoch)
        async with relay._at_end:
            with os_errors_as_ours(str(services.spool)):
                relay._folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="chain-"))
            relay._at_end.push_async_callback(
                in_thread, shutil.rmtree, relay._folder, ignore_errors=True
            )
            relay._at_end.callback(relay._close_sources)
            await relay._catch_up()
            yield relay

    def _close_sources(self) -> None:
        for each in self._sources:
            each.close()

    async def _catch_up(self) -> None:
        """Find out how far each line is."""
        store, storage = self._services.store, self._services.storage
        parts = await store.chains.parts(self._chain.id)
        batches = await store.batches.live([each.batch_id for each in parts])
        for part in parts:
            ordinals = np.frombuffer(part.ordinals, dtype="<u4")
            self._reached[ordinals] = np.maximum(self._reached[ordinals], part.stage)
            self._waiting[part.stage].given += len(ordinals)
            if not part.is_drained:
                file_id = batches[part.batch_id].record.input_file_id
                self._sources.append(Source(part.batch_id, file_id, part.stage, ordinals))
        results = results_prefix(self._chain)
        async with aclosing(new_segments(storage, results)) as segments:
            async for _, segment in segments:
                for header in decode_headers(segment, len(self._reached)).headers:
                    self._count_end(int(header["ordinal"]), Outcome(header["outcome"]))

    def _count_end(self, ordinal: int, outcome: Outcome) -> None:
        if self._reached[ordinal] != _ENDED:
            self._reached[ordinal] = _ENDED
            self._counts[outcome] += 1

    async def look(self) -> None:
        """Hand on what has been finished since the last time, and record it."""
        # Before segments are listed: of what is over, all of them are there.
        ended = await self._see_what_ended()
        for source in sorted(self._sources, key=lambda each: each.stage):
            await self._read(source)
            if (end := ended.get(source.batch_id)) and not _may_list_more(source, end.counted):
                await self._give_up_rest(source, end.part)
        chain = await self._services.store.batches.get(self._chain.id)
        if chain.paused_at is None:
            self._chain = chain
            await self._make_parts()
        for renderer in self._renderers.values():
            await renderer.end_if_idle()
        await self._record()

    async def close(self) -> None:
        """The chain has been stopped: record what is finished, and begin nothing."""
        self._is_closing = True
        left = list(self._sources)
        for seconds in (0.0, *LISTED_AGAIN_SECONDS):
            await asyncio.sleep(seconds)
            counted = await self._counted()
            for source in left:
                await self._read(source)
            left = [source for source in left if source.misses(counted[source.batch_id])]
            if not left:
                break
        await self._write_segments()
        await self._record_counts(is_open=False)

    # -- what has been finished ---------------------------------------------------------------

    async def _see_what_ended(self) -> dict[str, _Ended]:
        """The sources of which nothing more will come."""
        ended = {
            batch_id: _Ended(part, part.counts.completed + part.counts.failed)
            for batch_id, part in (await self._parts()).items()
            if part.status in TERMINAL
        }
        chunks = await self._services.store.chunks.summary(self._chain.id)
        if not (chunks.pending or chunks.leased):
            ended[self._first.batch_id] = _Ended(None, chunks.completed + chunks.failed)
        return ended

    async def _counted(self) -> dict[str, int]:
        """How many lines of each source are in its segments."""
        counts = {key: each.counts for key, each in (await self._parts()).items()}
        counted = {key: each.completed + each.failed for key, each in counts.items()}
        chunks = await self._services.store.chunks.summary(self._chain.id)
        return counted | {self._first.batch_id: chunks.completed + chunks.failed}

    async def _parts(self) -> dict[str, BatchRecord]:
        parts = [each.batch_id for each in self._sources if each is not self._first]
        found = await self._services.store.batches.live(parts)
        return {batch_id: each.record for batch_id, each in found.items()}

    async def _read(self, source: Source) -> None:
        async with aclosing(source.new_lines(self._services)) as segments:
            async for segment in segments:
                new = [each for each in segment if self._reached[each.ordinal] == source.stage]
                await self._hand_on(source, new)
                # Others of this process have their turn.
                await asyncio.sleep(0)

    async def _hand_on(self, source: Source, lines: list[FinishedLine]) -> None:
        following = source.stage + 1
        going_on = []
        for line in lines:
            if line.outcome is Outcome.ERROR:
                error_line = line.line
                if source is not self._first and is_refused(error_line):
                    custom_id = await self._custom_id(line.ordinal)
                    error_line = of_made_request(error_line, custom_id)
                error_line = of_stage(error_line, following)
                await self._end(line.ordinal, Outcome.ERROR, error_line, is_copy=line.is_copy)
            elif following > len(self._stages):
                await self._end(line.ordinal, Outcome.OUTPUT, line.line, is_copy=line.is_copy)
            else:
                going_on.append(line)
                if following > 1:
                    await self._segments[following].add(line.ordinal, line.outcome, line.line)
        if going_on and not self._is_closing:
            await self._into_stage(source, going_on, following)

    async def _into_stage(self, source: Source, lines: list[FinishedLine], following: int) -> None:
        first = await self._first.lines(self._services, self._folder)
        asked = await source.lines(self._services, self._folder)
        for group in groups_of(lines, asked, first):
            readable = []
            for each in group:
                own = first.line(each.ordinal)
                custom_id = custom_id_of(own)
                try:
                    variables = variables_of(asked.line(each.own_ordinal), each.line, own)
                except BodyNotMade as error:
                    await self._add_request(following, each.ordinal, custom_id, error)
                else:
                    readable.append(_Readable(each.ordinal, custom_id, variables))
            while readable:
                readable = await self._add_first_of(following, readable)
        if self._waiting[following].is_full:
            await self._make_part(self._waiting[following])

    async def _add_first_of(self, following: int, lines: list[_Readable]) -> list[_Readable]:
        """Those that are left. The bodies of the others are no longer held for them."""
        renderer = self._renderer(following)
        bodies = await renderer.render([each.variables for each in lines])
        for each, body in zip(lines, bodies, strict=False):
            await self._add_request(following, each.ordinal, each.custom_id, body)
        return lines[len(bodies) :]

    async def _add_request(
        self, following: int, ordinal: int, custom_id: str, body: bytes | BodyNotMade
    ) -> None:
        stage = self._stages[following - 1]
        model = str(stage.model or self._chain.model)
        made = line_or_refusal(custom_id, stage.endpoint, body, model)
        waiting = self._waiting[following]
        if not isinstance(made, BodyNotMade) and len(made) > waiting.most_bytes:
            made = BodyNotMade(f"its request has more than {waiting.most_bytes:,} bytes")
        if isinstance(made, BodyNotMade):
            refused = unanswered(custom_id, NoAnswerCode.TEMPLATE, f"{made}.")
            await self._end(ordinal, Outcome.ERROR, of_stage(refused.line, following + 1))
            return
        inputs = inputs_of(stage.endpoint, made, waiting.most_inputs)
        if not waiting.has_room_for(made, inputs):
            await self._make_part(waiting)
        waiting.add(ordinal, made, inputs)
        self._reached[ordinal] = following

    def _renderer(self, following: int) -> Renderer:
        if following not in self._renderers:
            template = self._stages[following - 1].template
            made = self._renderers[following] = Renderer(template, self._chain.tenant)
            self._at_end.push_async_exit(made)
        return self._renderers[following]

    async def _give_up_rest(self, source: Source, ended: BatchRecord | None) -> None:
        """The source is over: its lines without an answer are at their end."""
        source.is_over = True
        if ended is not None and ended.status is BatchStatus.EXPIRED:
            # What expires with the chain has its line when the chain's files are made.
            return
        code, why = NoAnswerCode.FAILED, DAMAGED.message
        if ended is not None:
            is_cancelled = ended.status is BatchStatus.CANCELLED
            code = NoAnswerCode.CANCELLED if is_cancelled else NoAnswerCode.FAILED
            why = ended.errors[0].message if ended.errors else ""
        left = source.ordinals[self._reached[source.ordinals] == source.stage]
        for ordinal in left.tolist():
            lost = unanswered(await self._custom_id(ordinal), code, why)
            await self._end(ordinal, Outcome.ERROR, of_stage(lost.line, source.stage + 1))

    async def _custom_id(self, ordinal: int) -> str:
        first = await self._first.lines(self._services, self._folder)
        return custom_id_of(first.line(ordinal))

    # -- to the next stage --------------------------------------------------------------------

    async def _make_parts(self) -> None:
        began_at = self._chain.in_progress_at or self._chain.created_at
        ran_seconds = max(0.0, await self._services.store.database.now() - began_at)
        for waiting in self._waiting.values():
            open_parts = sum(s.stage == waiting.stage and not s.is_over for s in self._sources)
            is_last = not any(s.stage < waiting.stage and not s.is_over for s in self._sources)
            if (is_last and waiting.lines) or waiting.is_due(
                open_parts=open_parts, ran_seconds=ran_seconds
            ):
                await self._make_part(waiting)

    async def _make_part(self, waiting: WaitingLines) -> None:
        # Before the lines are known to be in the next stage: then their answers are not read again.
        await self._write_segments()
        stage = self._stages[waiting.stage - 1]
        batch, part = await make_part(self._services, self._chain, stage, waiting, self._epoch)
        ordinals = np.frombuffer(part.ordinals, dtype="<u4")
        self._sources.append(Source(batch.id, batch.input_file_id, part.stage, ordinals))
        waiting.clear()

    # -- to their ends ------------------------------------------------------------------------

    async def _end(
        self, ordinal: int, outcome: Outcome, line: bytes, *, is_copy: bool = False
    ) -> None:
        self._count_end(ordinal, outcome)
        await self._segments[len(self._stages) + 1].add(ordinal, outcome, line, is_copy=is_copy)

    async def _write_segments(self) -> None:
        for each in self._segments.values():
            await each.write()

    async def _record(self) -> None:
        """First the results, then the row that counts them."""
        await self._write_segments()
        done = [each for each in self._sources if each.is_over and self._is_handed_on(each)]
        self._drained = [each.batch_id for each in done if each is not self._first]
        is_open = len(done) < len(self._sources)
        await self._record_counts(is_open=is_open)
        for each in done:
            if each is not self._first:
                each.close()
                self._sources.remove(each)
        self.is_done = not is_open

    def _is_handed_on(self, source: Source) -> bool:
        """Whether no line of the stage waits in memory only."""
        following = self._waiting.get(source.stage + 1)
        return following is None or not following.lines

    async def _record_counts(self, *, is_open: bool) -> None:
        state = (*self._counts.values(), tuple(self._drained), is_open)
        if state == self._recorded:
            return
        await self._services.store.chains.record(
            self._chain.id,
            completed=self._counts[Outcome.OUTPUT],
            failed=self._counts[Outcome.ERROR],
            drained=self._drained,
            is_open=is_open,
            epoch=self._epoch,
        )
        self._recorded = state


def _may_list_more(source: Source, counted: int) -> bool:
    """Some object stores list a new object a little later."""
    if not source.misses(counted):
        return False
    now = time.monotonic()
    if source.missed_since is None:
        source.missed_since = now
    return now - source.missed_since < sum(LISTED_AGAIN_SECONDS)


# -- beside the batch -----------------------------------------------------------------------------


@asynccontextmanager
async def relayed(services: Services, batch_id: str, epoch: int) -> AsyncIterator[None]:
    """While the block runs, hand on the lines of the batch, if it has further stages."""
    batch = await services.store.batches.get(batch_id)
    if not batch.stages:
        yield
        return
    async with beside(_keep_relaying(services, batch_id, epoch), name="chain"):
        yield


async def _keep_relaying(services: Services, batch_id: str, epoch: int) -> None:
    while True:
        try:
            async with ChainRelay.opened(services, batch_id, epoch) as relay:
                while not relay.is_done:
                    await relay.look()
                    await asyncio.sleep(HAND_ON_SECONDS)
                return
        except (LeaseLost, TransitionConflict):
            # Another owner has it, or it has been stopped.
            return
        except Exception as error:  # noqa: BLE001 - what is durable is still there: begin again
            log.warning("chain.not_seen", describe(error), batch=batch_id)
        await asyncio.sleep(intervals.LOOK_SECONDS)


async def settle_chain(services: Services, batch_id: str, epoch: int) -> None:
    """Stop what still runs of a chain that ends, and record what has been finished of it."""
    batch = await services.store.batches.get(batch_id)
    if not batch.stages or batch.in_progress_at is None:
        return
    if not (await services.store.chains.get(batch_id)).is_open:
        return
    await services.store.chains.cancel_parts(batch_id)
    await wait_for_stopping_runners(partial(services.store.chains.is_any_leased, batch_id))
    async with ChainRelay.opened(services, batch_id, epoch) as relay:
        await relay.close()
