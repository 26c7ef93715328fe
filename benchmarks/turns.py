"""How long a batch of ten lines takes behind the work of others, over its time alone.

Prefect's server, run-batches and run-chunks are real, each a process; the engine is the stub, with
the latency and the sequences of a small GPU. Behind a hundred batches of another tenant, and beside
a large batch of its own tenant and of another. The large batch has 20,000 lines in chunks of 8,192,
more than those of a million lines have: a small batch waits for chunks and for the window, whose
sizes are the same, and before tenants took turns in every queue it waited for the end of either
batch.

The prefix cache is simulated: the stub says in which order it ran the prompts.

``python -m benchmarks.turns million [LINES]`` measures only beside a batch of that many lines, in
the chunks that the product makes of it: while it is read and planned, and while it runs. It does
not wait for its end, which is 26 minutes away.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.store import RunnerKind
from benchmarks.inputs import document_questions, short_requests
from benchmarks.stub_services import MODEL
from tests.services.prefect import prefect_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping

    from batchyard.engine.base import Engine
    from batchyard.services.services import Services

ROOT = Path(__file__).parents[1]
LINES = 10
MANY = 100
_NEARLY_ALL = 85
LARGE_DOCUMENTS = 1_250
QUESTIONS = 16
LATENCY_SECONDS = 0.05
MAX_NUM_SEQS = 32
CACHED_DOCUMENTS = 24
_BLOCK_BYTES = 64
_DOCUMENT_WORDS = 40
_ALONE = 5
_BESIDE = 3
_ROUNDS_BESIDE = 10
_ROLES = ("run_batches", "run_chunks")
_ALL_SECONDS = 600.0


@dataclass(frozen=True)
class Waits:
    """Seconds from the creation of a batch of ten lines to its end, and what others had of it."""

    alone: list[float]
    behind_many: list[float]
    """One after the other, until nearly all of the hundred have ended."""
    many_done: int
    """Of the hundred: those that had ended before the first one."""
    many_seconds: float
    """Until all of the hundred had ended."""
    beside_own: list[float]
    beside_other: list[float]
    large_seconds: float
    """From the large batch's first line to its last, with all the small ones in between."""
    hit_rate: float
    """Of the large batch's lines, in the order in which they ran."""
    hit_rate_undisturbed: float
    """The same without the other lines in between."""
    two_hit_rate: float
    """Of two large batches of two tenants, side by side."""
    two_hit_rate_apart: float
    """The same, with the lines of one after those of the other."""

    def over_alone(self, seconds: Iterable[float]) -> float:
        return statistics.median(seconds) / statistics.median(self.alone)

    @property
    def large_speed(self) -> float:
        """Lines per second over those of an engine that is never idle."""
        lines = LARGE_DOCUMENTS * QUESTIONS
        return lines / self.large_seconds / (MAX_NUM_SEQS / LATENCY_SECONDS)


@dataclass(frozen=True)
class LargeWaits:
    """Seconds from the creation of a batch of ten lines to its end."""

    lines: int
    """Of the large batch."""
    alone: list[float]
    planning_other: list[float]
    """While the large batch of another tenant is read and planned."""
    beside_own: list[float]
    beside_other: list[float]


def measure() -> Waits:
    with _deployment({"BATCHYARD_CHUNK_REQUESTS": "8192"}) as folder:
        return asyncio.run(_measure(folder))


def measure_beside(lines: int, *, rounds: int = _ROUNDS_BESIDE) -> LargeWaits:
    """Beside a large batch of so many lines, in turns of its own tenant and of another."""
    with _deployment({}) as folder:
        return asyncio.run(_measure_beside(folder, lines, rounds))


@contextmanager
def _deployment(settings: Mapping[str, str]) -> Iterator[Path]:
    """Prefect's server and the two processes; their folder. Prints their logs if anything fails."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more = {
            "BATCHYARD_HOME": str(folder),
            "BATCHYARD_RUNNERS": "pool",
            "BATCHYARD_RUNNER_IDLE_SECONDS": "3600",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
            **settings,
        }
        server = stack.enter_context(prefect_server(folder, more))
        for role in _ROLES:
            command = [sys.executable, "-m", "benchmarks.turns", role]
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            process = Popen(command, cwd=ROOT, env=server.environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        try:
            yield folder
        except BaseException:
            for role in _ROLES:
                print((folder / f"{role}.log").read_text()[-3000:], file=sys.stderr)
            raise


async def _measure(folder: Path) -> Waits:
    small = short_requests(folder / "small.jsonl", count=LINES, model=MODEL, seed=1)
    large, other = (_large(folder, LARGE_DOCUMENTS, seed=seed) for seed in (2, 3))
    async with _services(folder) as services:
        await _until_ready(services)
        await _timed(services, small, "one")
        alone = [await _timed(services, small, "one") for _ in range(_ALONE)]

        began = time.perf_counter()
        many = [await _create(services, small, "many") for _ in range(MANY)]
        behind_many = [await _timed(services, small, "one")]
        many_done = len(await _ended(services, many))
        while len(await _ended(services, many)) < _NEARLY_ALL:
            behind_many.append(await _timed(services, small, "one"))
        await _until_ended(services, many)
        many_seconds = time.perf_counter() - began

        _ran(folder)
        large_id = await _create(services, large, "many")
        beside_own, beside_other = [], []
        while not (await services.store.chunks.summary(large_id)).completed:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        while len(beside_own) < _BESIDE and not await _ended(services, [large_id]):
            beside_other.append(await _timed(services, small, "one"))
            beside_own.append(await _timed(services, small, "many"))
        await _until_ended(services, [large_id])
        batch = await services.store.batches.get(large_id)
        assert batch.in_progress_at
        assert batch.finalizing_at
        prompts = {_digest(body): text for body, text in _bodies(large)}
        ran = _ran(folder)

        two = [await _create(services, each, each.stem) for each in (large, other)]
        await _until_ended(services, two)
    prompts_of_two = prompts | {_digest(body): text for body, text in _bodies(other)}
    ran_by_two = _ran(folder)
    apart = sorted(ran_by_two, key=lambda each: each in prompts)
    return Waits(
        alone=alone,
        behind_many=behind_many,
        many_done=many_done,
        many_seconds=many_seconds,
        beside_own=beside_own,
        beside_other=beside_other,
        large_seconds=batch.finalizing_at - batch.in_progress_at,
        hit_rate=_hit_rate(prompts, ran),
        hit_rate_undisturbed=_hit_rate(prompts, [each for each in ran if each in prompts]),
        two_hit_rate=_hit_rate(prompts_of_two, ran_by_two),
        two_hit_rate_apart=_hit_rate(prompts_of_two, apart),
    )


async def _measure_beside(folder: Path, lines: int, rounds: int) -> LargeWaits:
    small = short_requests(folder / "small.jsonl", count=LINES, model=MODEL, seed=1)
    large = _large(folder, lines // QUESTIONS, seed=2)
    async with _services(folder) as services:
        await _until_ready(services)
        await _timed(services, small, "one")
        alone = [await _timed(services, small, "one") for _ in range(_ALONE)]

        large_id = await _create(services, large, "many")
        planning_other, beside_own, beside_other = [], [], []
        while not (await services.store.chunks.summary(large_id)).completed:
            planning_other.append(await _timed(services, small, "one"))
        for _ in range(rounds):
            beside_other.append(await _timed(services, small, "one"))
            beside_own.append(await _timed(services, small, "many"))
        assert not await _ended(services, [large_id]), "the large batch has ended: more lines"
    return LargeWaits(
        lines=lines,
        alone=alone,
        planning_other=planning_other,
        beside_own=beside_own,
        beside_other=beside_other,
    )


def _large(folder: Path, documents: int, seed: int) -> Path:
    return document_questions(
        folder / f"large-{seed}.jsonl",
        documents=documents,
        questions=QUESTIONS,
        words_each=_DOCUMENT_WORDS,
        model=MODEL,
        seed=seed,
    )


def _ran(folder: Path) -> list[str]:
    """The digests of the requests that the engine ran since the last call, in its order."""
    witness = folder / "witness"
    digests = [line.split()[1] for line in witness.read_text().splitlines()]
    witness.unlink()
    return digests


async def _timed(services: Services, source: Path, tenant: str) -> float:
    began = time.perf_counter()
    await _until_ended(services, [await _create(services, source, tenant)])
    return time.perf_counter() - began


async def _create(services: Services, source: Path, tenant: str) -> str:
    return await create_batch(services, BatchRequest(input=LocalFile(source), tenant=tenant))


async def _until_ended(services: Services, batch_ids: Collection[str]) -> None:
    async with asyncio.timeout(_ALL_SECONDS):
        while len(await _ended(services, batch_ids)) < len(batch_ids):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.02)


async def _ended(services: Services, batch_ids: Collection[str]) -> list[str]:
    snapshots = await services.store.batch_leases.snapshots(batch_ids)
    ended = {name: each.status for name, each in snapshots.items() if each.status in TERMINAL}
    assert set(ended.values()) <= {BatchStatus.COMPLETED}, ended
    return list(ended)


async def _until_ready(services: Services) -> None:
    async with asyncio.timeout(_ALL_SECONDS):
        for kind in (RunnerKind.BATCHES, RunnerKind.CHUNKS):
            while not any(  # noqa: ASYNC110 - other processes bring it about
                runner.ready_at is not None
                for runner in await services.store.runners.live(kind=kind, within_seconds=60)
            ):
                await asyncio.sleep(0.1)


def _bodies(source: Path) -> Iterator[tuple[bytes, str]]:
    """Each request's body as the engine gets it, and its prompt."""
    for line in source.read_bytes().splitlines():
        _, _, tail = line.partition(b'"body": ')
        yield tail[:-1], json.dumps(json.loads(line)["body"]["messages"])


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _hit_rate(prompts: dict[str, str], ran: Iterable[str]) -> float:
    """The share of the prompts' blocks that a cache for some documents had when they ran."""
    room = CACHED_DOCUMENTS * (6 * _DOCUMENT_WORDS // _BLOCK_BYTES)
    cache: OrderedDict[str, None] = OrderedDict()
    found = asked = 0
    for digest in ran:
        text = prompts.get(digest, "")
        # A line of another batch shares nothing, and takes its place in the cache.
        blocks = [text[:end] for end in range(_BLOCK_BYTES, len(text), _BLOCK_BYTES)] or [
            f"{digest}{len(cache)}{number}" for number in range(6)
        ]
        for block in blocks:
            if text:
                asked += 1
                found += block in cache
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > room:
                cache.popitem(last=False)
    return found / asked


@asynccontextmanager
async def _services(folder: Path) -> AsyncIterator[Services]:
    engine = StubEngine(
        MODEL,
        latency=LATENCY_SECONDS,
        max_num_seqs=MAX_NUM_SEQS,
        keep_log=False,
        log_path=folder / "witness",
    )

    async def engine_for(_: str) -> Engine:
        return engine

    async with open_services(read_settings(home=folder), engine_for=engine_for) as services:
        yield services


async def _serve(role: str) -> None:
    # Prefect's import takes seconds, and only these processes need it.
    from flows.run_batches import run_batches  # noqa: PLC0415 - see above
    from flows.run_chunks import run_chunks  # noqa: PLC0415 - see above

    async with _services(Path(os.environ["BATCHYARD_HOME"])):
        await (run_batches() if role == "run_batches" else run_chunks(MODEL))


def table(waits: Waits) -> str:
    alone = statistics.median(waits.alone)
    rows = [
        ("alone", alone, "1"),
        (
            f"behind {MANY} batches of another tenant",
            statistics.median(waits.behind_many),
            f"**{waits.over_alone(waits.behind_many):.1f}**",
        ),
        (
            "beside a large batch of its own tenant",
            statistics.median(waits.beside_own),
            f"**{waits.over_alone(waits.beside_own):.1f}**",
        ),
        (
            "beside a large batch of another tenant",
            statistics.median(waits.beside_other),
            f"**{waits.over_alone(waits.beside_other):.1f}**",
        ),
    ]
    rest = (
        f"Behind the {MANY} batches went {len(waits.behind_many)}, one after the other: the median "
        f"is in the table, the slowest took {max(waits.behind_many):.1f} s, and before the first "
        f"one ended {waits.many_done} of the {MANY} had. "
        f"The {MANY} took {waits.many_seconds:.0f} s. The large batch ran at "
        f"**{100 * waits.large_speed:.0f} %** of the engine's speed, and its hit rate in a "
        f"simulated cache was **{100 * waits.hit_rate / waits.hit_rate_undisturbed:.1f} %** of "
        "that without the other lines in between. Two such batches of two tenants, side by side, "
        f"have **{100 * waits.two_hit_rate / waits.two_hit_rate_apart:.1f} %** of the hit rate "
        "that they have one after the other."
    )
    return "\n".join(
        [
            f"| a batch of {LINES} lines | seconds | over its time alone |",
            "|---|---|---|",
            *(f"| {name} | {seconds:.2f} | {ratio} |" for name, seconds, ratio in rows),
            "",
            rest,
        ]
    )


def table_beside(waits: LargeWaits) -> str:
    """Median and slowest of each; over the median alone."""
    alone = statistics.median(waits.alone)
    rows = [
        ("alone", waits.alone),
        ("while that of another tenant is read and planned", waits.planning_other),
        ("beside that of its own tenant", waits.beside_own),
        ("beside that of another tenant", waits.beside_other),
    ]
    head = f"| a batch of {LINES} lines, a large one of {waits.lines:,} | how many | seconds "
    lines = [head + "| over its time alone | slowest |", "|---|---|---|---|---|"]
    for name, seconds in rows:
        median = statistics.median(seconds)
        lines.append(
            f"| {name} | {len(seconds)} | {median:.2f} | **{median / alone:.1f}** "
            f"| {max(seconds) / alone:.1f} |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


def main(words: list[str]) -> None:
    match words:
        case []:
            print(table(measure()))
        case ["million", *lines]:
            print(table_beside(measure_beside(int(lines[0]) if lines else 1_000_000)))
        case [role] if role in _ROLES:
            asyncio.run(_serve(role))
        case _:
            sys.exit("python -m benchmarks.turns [million [LINES]]")


if __name__ == "__main__":
    main(sys.argv[1:])
