"""A whole installation without Prefect, and the checker that looks at what came out of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.store import (
    PATIENCE_SECONDS,
    BatchLocations,
    BatchOptions,
    NewBatch,
    upgrade,
)
from tests.faults import actor
from tests.hurry import hurried
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from batchyard.engine.base import Engine
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from tests.faults.nursery import Actor, Nursery

MODEL = "stub-model"
_POLL_SECONDS = 0.05
_UNFINISHED_CODES = {
    BatchStatus.CANCELLED: "batch_cancelled",
    BatchStatus.EXPIRED: "batch_expired",
    BatchStatus.FAILED: "batch_failed",
}


def lines(
    count: int, name: str = "id", *, model: str = MODEL, kinds: int | None = None
) -> list[dict[str, Any]]:
    """Requests whose bodies are all different, so that a witness tells them apart.

    With ``kinds`` there are no more bodies than that, of deterministic requests.
    """
    return [
        {
            "custom_id": f"{name}-{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [
                    {"role": "user", "content": f"question {n % (kinds or count)} of {name}"}
                ],
                "max_tokens": 4,
                **({"temperature": 0} if kinds else {}),
            },
        }
        for n in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Asked:
    """A batch that was created, and what was in it."""

    id: str
    custom_ids: list[str]
    digests: list[str]
    """Of the request bodies, as the witness has them."""


@dataclass(slots=True)
class Site:
    """``services`` are the test's own: what an API would work with."""

    services: Services
    folder: Path
    settings: dict[str, Any]
    """For the processes, as JSON."""
    hurry: dict[str, float] = field(default_factory=dict)
    """Likewise: how often they look for work."""
    _inputs: int = field(default=0)

    @property
    def witness_path(self) -> Path:
        return self.folder / "witness.log"

    @property
    def log_path(self) -> Path:
        return self.folder / "actors.log"

    # -- batches ----------------------------------------------------------------------------

    async def create(
        self,
        requests: list[dict[str, Any]],
        *,
        window_seconds: int = 86_400,
        url: str | None = None,
        output: str | None = None,
        deduplicate: bool = False,
        **new: Any,
    ) -> Asked:
        """``url``: where the input comes from, instead of a file. ``output``: a path."""
        self._inputs += 1
        path = self.folder / f"in-{self._inputs}.jsonl"
        path.write_bytes(as_input(requests))
        batch = await self.services.store.batches.create(
            NewBatch(
                endpoint="mixed",
                window_seconds=window_seconds,
                options=BatchOptions(mixed_endpoints=True, deduplicate=deduplicate),
                locations=BatchLocations(url or str(path), output),
                **new,
            )
        )
        bodies = [json.dumps(request["body"]).encode() for request in requests]
        return Asked(
            batch.id,
            [request["custom_id"] for request in requests],
            [hashlib.sha256(body).hexdigest() for body in bodies],
        )

    async def get(self, asked: Asked) -> BatchRecord:
        return await self.services.store.batches.get(asked.id)

    async def until(
        self, asked: Asked, is_true: Callable[[BatchRecord], bool], *, seconds: float = 30.0
    ) -> BatchRecord:
        """The batch, as soon as something is true of it."""
        give_up_at = time.monotonic() + PATIENCE * seconds
        while True:
            batch = await self.get(asked)
            if is_true(batch):
                return batch
            assert time.monotonic() < give_up_at, (
                f"after {seconds} s: {batch.status.value}, {batch.counts}\n{self.log_tail()}"
            )
            await asyncio.sleep(_POLL_SECONDS)

    async def ended(self, asked: Asked, *, seconds: float = 30.0) -> BatchRecord:
        return await self.until(asked, lambda batch: batch.status in TERMINAL, seconds=seconds)

    async def answered(self, asked: Asked, count: int) -> BatchRecord:
        """The batch, as soon as so many of its requests have their durable answer."""
        return await self.until(asked, lambda batch: batch.counts.completed >= count)

    # -- who does the work ------------------------------------------------------------------

    def parts(
        self,
        *,
        model: str = MODEL,
        max_num_seqs: int = 8,
        latency: float = 0.0,
        kills: str | None = None,
    ) -> Any:
        """What a process is made of; see :class:`~tests.faults.nursery.Nursery`.

        ``kills``: a request with this text kills the runner's process.
        """
        return {
            "settings": self.settings,
            "hurry": self.hurry,
            "model": model,
            "engine": {
                "max_num_seqs": max_num_seqs,
                "latency": latency,
                "kills": kills,
                "log_path": str(self.witness_path),
            },
            "log": str(self.log_path),
        }

    async def start(self, nursery: Nursery, role: str, **parts: Any) -> Actor:
        return await nursery.start(role, self.parts(**parts))

    @contextlib.asynccontextmanager
    async def working(
        self, *engines: Engine, controls: int = 1, services: Services | None = None
    ) -> AsyncIterator[None]:
        """Controls and a runner for each engine, as tasks of this process: the engine is in view.

        ``services``: what they work with, if not with those of the site.
        """
        used = services or self.services

        async def serve(engine: Engine) -> None:
            async def engine_for(_: str) -> Engine:
                return engine

            await actor.runner(replace(used, engine_for=engine_for), engine.model)

        tasks = [asyncio.create_task(actor.control(used)) for _ in range(controls)]
        tasks += [asyncio.create_task(serve(engine)) for engine in engines]
        try:
            yield
            for task in tasks:
                assert not task.done(), f"it ended early: {task}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # -- what came out of it ----------------------------------------------------------------

    def executions(self, asked: Asked | None = None) -> Counter[str]:
        """How often each request body was executed; of one batch, or of all."""
        if not self.witness_path.exists():
            return Counter()
        text = self.witness_path.read_text()
        seen = Counter(line.split()[1] for line in text.splitlines())
        if asked is None:
            return seen
        return Counter({digest: seen[digest] for digest in asked.digests if seen[digest]})

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-30:])

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        record = await self.services.store.files.get(file_id)
        parts = [part async for part in self.services.storage.get(record.storage_key)]
        data = b"".join(parts)
        assert len(data) == record.size_bytes
        assert hashlib.sha256(data).hexdigest() == record.sha256
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]

    async def check(self, asked: Asked, *, is_planned: bool = True) -> BatchRecord:
        """Every promise about the files of a batch that has ended, whatever it ended as.

        ``is_planned``: it came as far as ``in_progress``; otherwise it must have no files.
        """
        batch = await self.get(asked)
        assert batch.status in TERMINAL
        output = await self.results(batch.output_file_id)
        error = await self.results(batch.error_file_id)
        unfinished_code = _UNFINISHED_CODES.get(batch.status)
        unfinished = [line for line in error if _code(line) == unfinished_code is not None]
        ids = Counter(line["custom_id"] for line in (*output, *error))
        assert ids == Counter(asked.custom_ids if is_planned else ())
        for file in (output, error):
            _assert_in_input_order((line["custom_id"] for line in file), asked.custom_ids)
        counts = batch.counts
        assert counts.total == (len(asked.custom_ids) if is_planned else 0)
        assert counts.completed == len(output)
        assert counts.failed == len(error) - len(unfinished)
        if batch.status is BatchStatus.COMPLETED:
            assert counts.completed + counts.failed == counts.total
        ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
        assert sum(end is not None for end in ends) == 1
        return batch


def as_input(requests: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def _code(line: dict[str, Any]) -> str | None:
    return line["error"] and line["error"]["code"]


def _assert_in_input_order(found: Iterable[str], wanted: list[str]) -> None:
    place = {custom_id: index for index, custom_id in enumerate(wanted)}
    places = [place[custom_id] for custom_id in found]
    assert places == sorted(places)


@contextlib.asynccontextmanager
async def open_site(
    folder: Path,
    *,
    lease_seconds: float,
    look_seconds: float = 0.1,
    poll_seconds: float = 0.05,
    database_url: str | None = None,
    **settings: Any,
) -> AsyncIterator[Site]:
    """``settings`` differ from those of a test: everybody looks often, chunks are small."""
    given: dict[str, Any] = {
        "home": str(folder / "home"),
        "chunk_requests": 50,
        "lease_seconds": lease_seconds,
        "flush_seconds": 0.05,
        "runner_idle_seconds": 3600.0,
    }
    given |= settings
    if database_url is not None:
        given["database_url"] = database_url
        await upgrade(database_url, patience_seconds=PATIENCE_SECONDS)

    async def no_engine(_: str) -> Engine:
        raise AssertionError("the test itself runs nothing")

    hurry = {"look_seconds": look_seconds, "poll_seconds": poll_seconds}
    async with open_services(read_settings(**given), engine_for=no_engine) as services:
        with hurried(**hurry):
            yield Site(services, folder, given, hurry)
