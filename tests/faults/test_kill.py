"""Everything may die at any moment: nothing is lost, nothing is doubled, little is run twice."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import TERMINAL, BatchStatus
from tests.faults.site import lines
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Asked, Site

MAX_NUM_SEQS = 8


@pytest.fixture
def lease_seconds() -> float:
    return 2.0


@dataclass(slots=True)
class Supervisor:
    """Keeps its processes alive, and kills one of them now and then."""

    site: Site
    nursery: Nursery
    random: random.Random
    actors: list[Actor] = field(default_factory=list)
    runners_hit: int = 0
    controls_hit: int = 0
    stops: int = 0
    asleep: dict[int, float] = field(default_factory=dict)
    """When each stopped process is to go on, by process id."""

    async def keep_alive(self) -> None:
        for index, actor in enumerate(self.actors):
            if not self.nursery.is_alive(actor):
                self.asleep.pop(actor.pid, None)
                self.actors[index] = await self.nursery.start(actor.role, actor.parts)
            elif self.asleep.get(actor.pid, float("inf")) <= time.monotonic():
                del self.asleep[actor.pid]
                await self.nursery.signal(actor, signal.SIGCONT)

    async def strike(self) -> None:
        victim = self.random.choice(self.actors)
        if victim.pid in self.asleep:
            return
        # One that sleeps through its lease wakes up as a zombie.
        if self.random.random() < 0.15:
            self.stops += 1
            lease_seconds = self.site.services.settings.lease_seconds
            self.asleep[victim.pid] = time.monotonic() + 1.5 * lease_seconds
            await self.nursery.signal(victim, signal.SIGSTOP)
        else:
            await self.nursery.signal(victim, signal.SIGKILL)
        if victim.role == "runner":
            self.runners_hit += 1
        else:
            self.controls_hit += 1

    async def rage(self, asked: Asked, *, least: int, most: int, seconds: float) -> None:
        """Until the batch has ended, with ``least`` to ``most`` strikes."""
        give_up_at = time.monotonic() + PATIENCE * seconds
        next_at = time.monotonic() + 0.5
        while True:
            await self.keep_alive()
            has_ended = (await self.site.get(asked)).status in TERMINAL
            struck = self.runners_hit + self.controls_hit
            if has_ended:
                assert struck >= least, f"only {struck} strikes: make the batch longer"
                return
            assert time.monotonic() < give_up_at, self.site.log_tail()
            if time.monotonic() >= next_at and struck < most:
                await self.strike()
                next_at = time.monotonic() + self.random.uniform(0.05, 0.5)
            await asyncio.sleep(0.02)


async def kill_test(
    site: Site,
    nursery: Nursery,
    *,
    seed: int,
    requests: int,
    latency: float,
    least: int,
    most: int,
    seconds: float,
    copies: int = 0,
    spare_hits: int = 0,
) -> None:
    """``copies``: of each request, in a batch that runs them once.

    ``spare_hits``: so many more runners may have lost a window. Over many hits the bound is what
    a window holds; among a few, one that was hit while its disk was busy counts for two.
    """
    began = time.monotonic()
    supervisor = Supervisor(site, nursery, random.Random(seed))
    for role in ("control", "control", "runner", "runner"):
        parts = {"max_num_seqs": MAX_NUM_SEQS, "latency": latency}
        supervisor.actors.append(await site.start(nursery, role, **parts))
    total = requests * (1 + copies)
    asked = await site.create(
        lines(total, kinds=requests if copies else None), deduplicate=bool(copies)
    )
    await supervisor.rage(asked, least=least, most=most, seconds=seconds)
    batch = await site.check(asked)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, total)

    executed = site.executions(asked)
    wasted = executed.total() - requests
    # Where an answer is durable and some of its copies are not, it is asked for once more.
    hits = supervisor.runners_hit + spare_hits
    bound = hits * 2 * MAX_NUM_SEQS * (2 if copies else 1)
    print(  # noqa: T201 - the figures are what the test is for
        f"\nkill test: seed {seed}, {supervisor.controls_hit} controls and "
        f"{supervisor.runners_hit} runners hit ({supervisor.stops} stopped past their lease), "
        f"{time.monotonic() - began:.1f} s, {executed.total()} executed, {wasted} wasted, "
        f"bound {bound}"
    )
    assert set(executed) == set(asked.digests)
    assert wasted <= bound

    # Those that sleep wake up, everybody looks around: no result changes any more. An engine goes
    # on with what it has.
    late = len(supervisor.asleep) * 2 * MAX_NUM_SEQS
    for actor in supervisor.actors:
        await nursery.signal(actor, signal.SIGCONT)
    await asyncio.sleep(1.0)
    assert await site.check(asked) == batch
    assert site.executions(asked).total() - executed.total() <= late


@pytest.mark.alone
@pytest.mark.parametrize("seed", [1])
async def test_whatever_is_killed_every_request_is_answered_once(
    site: Site, nursery: Nursery, seed: int
) -> None:
    """What is answered and not yet saved runs again too: beside others, the disk takes longer."""
    await kill_test(
        site,
        nursery,
        seed=seed,
        requests=1500,
        latency=0.06,
        least=8,
        most=14,
        seconds=60,
        spare_hits=2,
    )


async def test_whatever_is_killed_identical_requests_are_each_answered_once(
    site: Site, nursery: Nursery
) -> None:
    await kill_test(
        site,
        nursery,
        seed=2,
        requests=1000,
        copies=9,
        latency=0.06,
        least=6,
        most=12,
        seconds=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_ten_thousand_requests_survive_fifty_kills(
    site: Site, nursery: Nursery, seed: int
) -> None:
    await kill_test(
        site, nursery, seed=seed, requests=10_000, latency=0.06, least=50, most=10_000, seconds=280
    )
