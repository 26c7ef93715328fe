"""How much costly work a process does at once, and whose is next."""

from __future__ import annotations

import asyncio

from batchyard.processes.tenant_turns import TenantTurns


class Work:
    """Pieces of work that go on until they are told to end."""

    def __init__(self, most: int) -> None:
        self._turns = TenantTurns(most)
        self._ends: dict[str, asyncio.Event] = {}
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Each name begins with its tenant's letter."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        for _ in range(3):
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.running.append(name)
            await self._ends[name].wait()
            self.running.remove(name)


async def test_a_tenant_has_one_turn_at_a_time_and_others_go_before_its_next() -> None:
    work = Work(2)
    await work.begin("a1", "a2", "a3", "b1", "c1")
    assert work.running == ["a1", "b1"]
    await work.end("a1")
    assert work.running == ["b1", "c1"]
    await work.end("b1")
    assert work.running == ["c1", "a2"]
    await work.end("c1")
    await work.end("a2")
    await work.end("a3")


async def test_work_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    work = Work(1)
    await work.begin("a1", "b1", "c1")
    work.tasks["b1"].cancel()
    work.tasks["a1"].cancel()
    await asyncio.gather(*(work.tasks[name] for name in ("a1", "b1")), return_exceptions=True)
    await asyncio.sleep(0)
    assert work.running[-1] == "c1"
    await work.end("c1")
