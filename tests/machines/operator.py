"""What a test does and sees: batches over the API, the database, Prefect; and the checker."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import RunnerKind
from tests.faults.site import Asked, Site, lines
from tests.machines.cluster import LEASE_SECONDS
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from batchyard.dispatch import FlowRun, PrefectApi
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from tests.machines.cluster import Cluster
    from tests.machines.machine import Machine

WAIT_SECONDS = 120.0


def engine_of(machine: Machine, model: str) -> list[int]:
    """Its processes on that machine, as we see them."""
    return machine.processes("--served-model-name", model)


@dataclass
class Operator:
    """Submits batches as tenants do, and looks at what an operator may look at."""

    cluster: Cluster
    services: Services
    http: aiohttp.ClientSession
    prefect: PrefectApi
    folder: Path
    keys: dict[str, str] = field(default_factory=dict)
    _batches: dict[str, Asked] = field(default_factory=dict)

    # -- batches ----------------------------------------------------------------------------

    async def submit(
        self,
        model: str,
        count: int,
        name: str,
        *,
        tenant: str = "ours",
        milliseconds: int = 100,
        poison: int | None = None,
    ) -> Asked:
        """A batch of so many requests over the API. The one numbered ``poison`` kills engines."""
        requests = lines(count, name, model=model)
        for number, request in enumerate(requests):
            said = f"takes {milliseconds} ms" if number != poison else "poison"
            request["body"]["messages"][0]["content"] += f", {said}"
        text = "".join(json.dumps(request) + "\n" for request in requests)
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", text.encode(), filename=f"{name}.jsonl")
        headers = {"Authorization": f"Bearer {await self._key(tenant)}"}
        file_id = (await self._post("/files", headers, data=form))["id"]
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch_id = (await self._post("/batches", headers, json=body))["id"]
        asked = Asked(batch_id, [request["custom_id"] for request in requests], [])
        self._batches[batch_id] = asked
        return asked

    async def api_answers(self) -> None:
        """Return when it does: it takes its time where its machine has just been booted."""

        async def is_there() -> bool:
            try:
                async with self.http.get(f"{self.cluster.api_url}/models"):
                    return True
            except aiohttp.ClientError:
                return False

        await self.until(is_there, "the API")

    async def get(self, asked: Asked) -> BatchRecord:
        return await self.services.store.batches.get(asked.id)

    async def answered(self, asked: Asked) -> int:
        """How many of its requests have their durable answer."""
        batch = await self.get(asked)
        chunks = await self.services.store.chunks.summary(asked.id)
        return max(chunks.completed, batch.counts.completed)

    async def is_under_way(
        self, *batches: Asked, count: int = 10, seconds: float = WAIT_SECONDS
    ) -> None:
        """Return when each has so many durable answers."""
        for asked in batches:

            async def some_are_durable(asked: Asked = asked) -> bool:
                return await self.answered(asked) >= count

            await self.until(some_are_durable, f"{count} answers of {asked.id}", seconds)

    async def goes_on(self, *batches: Asked) -> None:
        """Return when each has more answers than now, or has ended."""
        seen = {asked.id: await self.answered(asked) for asked in batches}
        for asked in batches:

            async def has_more(asked: Asked = asked) -> bool:
                ended = (await self.get(asked)).status in TERMINAL
                return ended or await self.answered(asked) > seen[asked.id]

            await self.until(has_more, f"an answer of {asked.id}")

    async def ended(self, asked: Asked, seconds: float = WAIT_SECONDS) -> BatchRecord:
        async def is_over() -> BatchRecord | None:
            batch = await self.get(asked)
            return batch if batch.status in TERMINAL else None

        found: BatchRecord = await self.until(is_over, f"the end of {asked.id}", seconds)
        return found

    # -- the checker ------------------------------------------------------------------------

    async def check(self, asked: Asked) -> BatchRecord:
        """Every promise about a batch that has ended, whatever it ended as."""
        return await Site(self.services, self.folder, {}).check(asked)

    async def check_completed(self, *batches: Asked, seconds: float = WAIT_SECONDS) -> None:
        """They end as ``completed``, and each line has its answer, once and in its place."""
        for asked in batches:
            ended = await self.ended(asked, seconds)
            assert ended.status is BatchStatus.COMPLETED, ended.errors
            batch = await self.check(asked)
            assert batch.counts.completed == len(asked.custom_ids)

    async def check_all_completed(self, seconds: float = WAIT_SECONDS) -> None:
        """What :meth:`check_completed` says, of every batch of this test."""
        await self.check_completed(*self._batches.values(), seconds=seconds)

    async def two_tenants(
        self, model: str, count: int, *, milliseconds: int = 100
    ) -> tuple[Asked, Asked]:
        """A batch of each tenant for one model, both with durable answers."""
        ours = await self.submit(model, count, "ours", milliseconds=milliseconds)
        theirs = await self.submit(
            model, count, "theirs", tenant="theirs", milliseconds=milliseconds
        )
        await self.is_under_way(ours, theirs)
        return ours, theirs

    async def statuses(self, *batches: Asked) -> set[str]:
        return {(await self.get(asked)).status.value for asked in batches}

    # -- runners ----------------------------------------------------------------------------

    async def runners_of(self, model: str) -> list[FlowRun]:
        """The flow runs of run-chunks for the model, whatever has become of them."""
        flow = {"name": {"any_": ["run-chunks"]}}
        return await self.prefect._filter({"flows": flow, "flow_runs": {"tags": {"all_": [model]}}})

    async def runner_ends(self, model: str, *, says: str) -> FlowRun:
        """A flow run of the model that has ended and has these words in its message."""

        async def has_ended() -> FlowRun | None:
            for run in await self.runners_of(model):
                if run.has_ended and says in run.message:
                    return run
            return None

        found: FlowRun = await self.until(has_ended, f"a runner of {model} that says {says!r}")
        return found

    async def machines_of(self, model: str, count: int) -> list[Machine]:
        """The machines on which an engine of the model runs or loads, once there are so many."""

        async def are_there() -> list[Machine]:
            machines = self.cluster.gpu_machines
            found = [each for each in machines if each.is_on and engine_of(each, model)]
            return found if len(found) == count else []

        found: list[Machine] = await self.until(are_there, f"{count} engines of {model}")
        return found

    async def kill_runner(self, machine: Machine, model: str) -> None:
        """SIGKILL to the process of the model's flow run on a machine."""

        async def was_there() -> int:
            runs = await self.prefect.active("run-chunks/gpu")
            return sum(machine.kill(PREFECT__FLOW_RUN_ID=run.id) for run in runs)

        await self.until(was_there, f"a runner of {model} on {machine.name}")

    # -- control ----------------------------------------------------------------------------

    async def reconciler_at_work(self) -> None:
        """Return when one runs and another one stands by."""

        async def is_complete() -> bool:
            runs = await self.prefect.active("reconcile/default")
            due = {run.state for run in runs if "reconcile" in run.tags}
            return {"RUNNING", "SCHEDULED"} <= due

        await self.until(is_complete, "a reconciler and one that stands by")

    async def is_taken_up(self, asked: Asked, *, after: int) -> None:
        """Return when another process has the batch than the one with that epoch."""

        async def has_another() -> bool:
            batch = await self.get(asked)
            return batch.status in TERMINAL or batch.epoch > after

        await self.until(has_another, f"another process for {asked.id}", 300)

    async def set_job_variable(self, deployment: str, name: str, value: str | None) -> None:
        """As an operator does in Prefect's UI; None: as prefect.yaml has it."""
        found = (await self.prefect._call("GET", f"/deployments/name/{deployment}")).json
        variables = {key: each for key, each in found["job_variables"].items() if key != name}
        if value is not None:
            variables[name] = value
        body = {"job_variables": variables}
        await self.prefect._call("PATCH", f"/deployments/{found['id']}", body)

    async def no_runner_is_left(self) -> None:
        """Those of an earlier test have gone, so that both GPU machines are free."""
        runners = self.services.store.runners

        async def are_gone() -> bool:
            rows = await runners.live(kind=RunnerKind.CHUNKS, within_seconds=LEASE_SECONDS)
            for row in rows:
                await runners.drain(row.id)
            active = await self.prefect.active("run-chunks/gpu")
            if not rows:
                for run in active:
                    await self._end_if_lost(run)
            return not active

        await self.until(are_gone, "the end of earlier runners")

    async def _end_if_lost(self, run: FlowRun) -> None:
        """The scheduler does so too, in its time: a machine that lost its power left it behind."""
        variables = {"PREFECT__FLOW_RUN_ID": run.id}
        if not any(each.processes(**variables) for each in self.cluster.gpu_machines):
            await self.prefect.mark_crashed(run.id, "Ended before the next test.")

    # -- waiting ----------------------------------------------------------------------------

    async def until(
        self, condition: Callable[[], Awaitable[Any]], what: str, seconds: float = WAIT_SECONDS
    ) -> Any:
        """What ``condition`` gives, once it gives something."""
        deadline = time.monotonic() + PATIENCE * seconds
        while not (found := await condition()):
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}\n{await self.story()}"
            await asyncio.sleep(0.1)
        return found

    async def story(self) -> str:
        """How things stand, for whoever has to find out why a test failed."""
        said = []
        for asked in self._batches.values():
            batch = await self.get(asked)
            said.append(f"{asked.id} {batch.status.value} {batch.counts} {batch.errors}")
            said.append(f"  {await self.services.store.chunks.summary(asked.id)}")
        machines = [machine for machine in self.cluster.machines.values() if machine.is_on]
        said += [f"--- {machine.name}\n{machine.log('worker')}" for machine in machines]
        return "\n".join(said)

    async def _key(self, tenant: str) -> str:
        if tenant not in self.keys:
            made = await self.services.store.api_keys.create(tenant, tenant)
            self.keys[tenant] = made.secret
        return self.keys[tenant]

    async def _post(self, path: str, headers: dict[str, str], **what: Any) -> Any:
        url = self.cluster.api_url + path
        async with self.http.post(url, headers=headers, **what) as response:
            assert response.ok, await response.text()
            return await response.json()
