"""Mixed traffic at half of the measured capacity, without and with a process killed each minute.

Two API processes, a control process, a runner with a stub engine, PostgreSQL and a folder, all on
this machine. 200 clients send small requests of seven kinds, each to one of the two processes, and
do as SDKs do: an answer that is lost, and a 503, is asked for again, here at the other process.
Every batch that was accepted must have each of its lines once at the end.

    python -m benchmarks.load_with_faults 60
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from batchyard.lifecycle import TERMINAL
from tests.faults.nursery import running_nursery
from tests.faults.site import open_site
from tests.mixtures import lines
from tests.mixtures.installation import NURSERY
from tests.services.ports import free_ports
from tests.services.postgres import postgres_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Site

CLIENTS: Final = 200
LINES: Final = 5
CAPACITY_SECONDS: Final = 30.0
BETWEEN_KILLS_SECONDS: Final = 60.0
_ATTEMPTS: Final = 20
# Clients look much more often than they create. A batch costs as much as dozens of looks: with more
# of them, they would wait longer and longer for each other.
_SHARES: Final = {
    "look at a batch": 50,
    "list batches": 20,
    "read results": 18,
    "download a file": 5,
    "upload a file": 4,
    "create a batch": 2,
    "cancel a batch": 1,
}


@dataclass(slots=True)
class Phase:
    """What clients have met: seconds by kind of request, and how many attempts were repeated."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    repeated: int = 0
    kills: int = 0

    def p99(self, kind: str) -> float:
        found = self.seconds[kind]
        return statistics.quantiles(found, n=100)[98] if len(found) > 1 else float("nan")


@dataclass(slots=True)
class Installation:
    site: Site
    nursery: Nursery
    ports: list[int]
    key: str
    actors: list[tuple[Actor, dict[str, Any]]] = field(default_factory=list)

    async def start(self, role: str, port: int = 0) -> None:
        parts = self.site.parts(model=lines.MODEL) | {"port": port}
        self.actors.append((await self.nursery.start(role, parts), parts))

    async def kill_one(self, draw: random.Random) -> str:
        index = draw.randrange(len(self.actors))
        actor, parts = self.actors[index]
        await self.nursery.kill(actor)
        # As a service manager does.
        await asyncio.sleep(1.0)
        self.actors[index] = (await self.nursery.start(actor.role, parts), parts)
        return actor.role


@dataclass(slots=True)
class Traffic:
    """The clients. ``created``: the batches that were acknowledged, with their lines."""

    installation: Installation
    http: aiohttp.ClientSession
    phase: Phase = field(default_factory=Phase)
    created: dict[str, list[lines.Line]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    file_ids: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, seconds: float, *, rate: float | None = None) -> float:
        """Let all clients work for so long; the requests a second. ``rate``: not more than that."""
        until = time.monotonic() + seconds
        pause = 0.0 if rate is None else CLIENTS / rate
        before = sum(map(len, self.phase.seconds.values()))
        began = time.monotonic()

        async def client(number: int) -> None:
            draw = random.Random(f"{number} {began}")
            await asyncio.sleep(draw.uniform(0, pause))
            while (now := time.monotonic()) < until:
                kind = draw.choices(list(_SHARES), list(_SHARES.values()))[0]
                await self._ask(kind, draw)
                if rest := now + pause - time.monotonic():
                    await asyncio.sleep(max(0.0, rest))

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        done = sum(map(len, self.phase.seconds.values())) - before
        return done / (time.monotonic() - began)

    async def _ask(self, kind: str, draw: random.Random) -> None:
        began = time.perf_counter()
        batch_id = draw.choice(list(self.created)[-300:]) if self.created else None
        match kind:
            case "upload a file":
                await self._upload()
            case "list batches":
                await self._call("GET", "/batches?limit=20")
            case "download a file" if self.file_ids:
                file_id = draw.choice(self.file_ids[-300:])
                await self._call("GET", f"/files/{file_id}/content")
            case "look at a batch" if batch_id:
                await self._call("GET", f"/batches/{batch_id}")
            case "read results" if batch_id:
                await self._call("GET", f"/batches/{batch_id}/results")
            case "cancel a batch" if batch_id:
                self.cancelled.add(batch_id)
                await self._call("POST", f"/batches/{batch_id}/cancel", may_be=(409,))
            case _:
                kind = "create a batch"
                await self._create()
        self.phase.seconds[kind].append(time.perf_counter() - began)

    async def _upload(self) -> None:
        content = lines.as_input(self._some_lines())

        def form() -> dict[str, Any]:
            data = aiohttp.FormData({"purpose": "batch"})
            data.add_field("file", content, filename="in.jsonl")
            return {"data": data}

        self.file_ids.append(json.loads(await self._call("POST", "/files", form))["id"])

    async def _create(self) -> None:
        asked = self._some_lines()
        body = {
            "endpoint": lines.CHAT,
            "completion_window": "24h",
            "requests": [line.as_object() for line in asked],
        }
        headers = {"idempotency-key": asked[0].custom_id}
        answer = await self._call("POST", "/batches", lambda: {"json": body, "headers": headers})
        self.created[json.loads(answer)["id"]] = asked

    def _some_lines(self) -> list[lines.Line]:
        number = next(self._numbers)
        return [lines.Line(f"{number}-{n}", lines.CHAT, f"{number} {n}") for n in range(LINES)]

    async def _call(
        self,
        method: str,
        path: str,
        options: Callable[[], dict[str, Any]] = dict,
        *,
        may_be: tuple[int, ...] = (),
    ) -> bytes:
        ports = random.sample(self.installation.ports, 2)
        for attempt in range(_ATTEMPTS):
            url = f"http://127.0.0.1:{ports[attempt % 2]}/v1{path}"
            try:
                async with self.http.request(method, url, **options()) as answer:
                    found = await answer.read()
            except aiohttp.ClientError:
                self.phase.repeated += 1
                continue
            if answer.status == 503:
                self.phase.repeated += 1
                await asyncio.sleep(0.5)
                continue
            assert answer.status < 400 or answer.status in may_be, f"{path}: {found.decode()}"
            return found
        raise AssertionError(f"{method} {path} has no answer")

    async def lost(self) -> list[str]:
        """What is wrong with the batches that were accepted, once all have ended."""
        store = self.installation.site.services.store
        wrong = []
        for batch_id, asked in self.created.items():
            deadline = time.monotonic() + 600
            while (batch := await store.batches.get(batch_id)).status not in TERMINAL:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
            found = [
                json.loads(line)
                for line in (await self._call("GET", f"/batches/{batch_id}/results")).splitlines()
            ]
            is_whole = batch.counts.total == 0 or Counter(
                each["custom_id"] for each in found
            ) == Counter(line.custom_id for line in asked)
            is_right = batch_id in self.cancelled or batch.counts.completed == len(asked)
            if not (is_whole and is_right):
                wrong.append(f"{batch_id}: {batch.status} {batch.counts}")
        return wrong


async def measure(minutes: float) -> tuple[float, Phase, Phase, int, list[str]]:
    """Requests a second at most; a phase without kills and one with them; batches; what is lost."""
    with (
        tempfile.TemporaryDirectory() as folder,
        postgres_on(*free_ports(1)) as cluster,
    ):
        url = cluster.url(await cluster.create_database())
        async with (
            running_nursery(NURSERY) as nursery,
            open_site(
                Path(folder),
                lease_seconds=10.0,
                database_url=url,
                allow_private_urls=True,
                quota={"batches_per_hour": "none"},
            ) as site,
            _clients(site) as (http, key),
        ):
            here = Installation(site, nursery, free_ports(2), key)
            for role, port in (("api", here.ports[0]), ("api", here.ports[1])):
                await here.start(role, port)
            await here.start("control")
            await here.start("runner")
            traffic = Traffic(here, http)
            await asyncio.sleep(3.0)
            most = await traffic.run(CAPACITY_SECONDS)
            quiet = traffic.phase = Phase()
            await traffic.run(60 * minutes, rate=most / 2)
            killing = traffic.phase = Phase()
            killer = asyncio.create_task(_kill_regularly(here, killing))
            await traffic.run(60 * minutes, rate=most / 2)
            killer.cancel()
            await asyncio.wait([killer])
            # A process that was killed last may not be there yet.
            await asyncio.sleep(3.0)
            return most, quiet, killing, len(traffic.created), await traffic.lost()


async def _kill_regularly(here: Installation, phase: Phase) -> None:
    draw = random.Random(1)
    while True:
        await asyncio.sleep(BETWEEN_KILLS_SECONDS)
        await asyncio.shield(here.kill_one(draw))
        phase.kills += 1


@contextlib.asynccontextmanager
async def _clients(site: Site) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    key = (await site.services.store.api_keys.create("one", "load")).secret
    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=CLIENTS),
        timeout=aiohttp.ClientTimeout(total=60),
    ) as http:
        yield http, key


def table(found: tuple[float, Phase, Phase, int, list[str]]) -> str:
    most, quiet, killing, batches, lost = found
    rows = [
        f"| {kind} | {1000 * quiet.p99(kind):,.0f} | {1000 * killing.p99(kind):,.0f} |"
        for kind in _SHARES
    ]
    head = (
        f"| {CLIENTS} clients, {most / 2:,.0f} requests a second | 99 % within, ms "
        f"| with {killing.kills} kills, ms |"
    )
    return "\n".join(
        [
            head,
            "|---|---|---|",
            *rows,
            f"| requests that were sent again | {quiet.repeated} | {killing.repeated} |",
            f"| batches that lost or doubled a line, of {batches:,} | | {len(lost)} |",
        ]
    )


if __name__ == "__main__":
    minutes_given = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print(table(asyncio.run(measure(minutes_given))))
