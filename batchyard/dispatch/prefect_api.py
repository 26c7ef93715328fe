"""Prefect's REST API: the few calls that Batchyard needs.

``flow/deployment`` names a deployment, as Prefect's own command line does.
Prefect's client would cost the API and the command line the 1.5 s that its import takes.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from batchyard.dispatch.prefect_answers import (
    BEGUN,
    ON_ITS_WAY,
    SOON_SECONDS,
    FlowRun,
    LogLine,
    OfferedModel,
    flow_run_from,
    log_line_from,
    offered_model_from,
)
from batchyard.dispatch.prefect_http import Missing, PrefectHttp

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

RUN_CHUNKS = "run-chunks"
"""The flow; it has a deployment on each GPU pool, named after the pool."""
RUN_BATCHES = "run-batches/default"
PROCESS_BATCH = "process-batch/default"
RECONCILE = "reconcile/default"
ENGINE_BLOCKS = ("batchyard-vllm-engine", "batchyard-remote-engine")
"""The block types that say how a model is served."""
TAKEN_UP = "run-batches"
"""The tag of the process-batch flow runs that a batch runner makes: no worker ends them for it."""

_STANDING_BY = "StandingBy"
"""The state of a flow run that another one postpones again and again."""
_PAGE = 200
"""Prefect's own limit for one answer."""
_NEWEST_AMONG = 20


class PrefectApi(PrefectHttp):
    """The calls of Prefect's REST API that Batchyard needs. Use as an async context manager.

    Every call raises :class:`~batchyard.errors.DispatchFailed` if the server does not do what was
    asked, and :class:`~batchyard.errors.SettingsError` if a further attempt cannot help.
    """

    # -- starting and ending ----------------------------------------------------------------

    async def start(
        self,
        deployment: str,
        parameters: Mapping[str, Any],
        *,
        name: str,
        key: str | None = None,
        after_seconds: float = 0.0,
    ) -> FlowRun:
        """Start ``flow/deployment`` under ``name``, which is its tag as well.

        It starts ``after_seconds`` from now. Calls with the same ``key`` get the same flow run.
        """
        found = await self._call("GET", f"/deployments/name/{deployment}")
        if found.json.get("work_pool_name") is None:
            # Its pool was deleted: no worker would ever take the flow run.
            raise Missing(f"The deployment {deployment} has no work pool: run `batchyard deploy`.")
        body = {
            "name": name,
            "tags": [name],
            "parameters": dict(parameters),
            "state": _scheduled(found.at, after_seconds),
            "idempotency_key": key or secrets.token_hex(16),
        }
        path = f"/deployments/{found.json['id']}/create_flow_run"
        answer = await self._call("POST", path, body)
        return flow_run_from(answer.json, answer.at)

    async def start_after(
        self, deployment: str, parameters: Mapping[str, Any], *, name: str, last: str | None
    ) -> FlowRun:
        """The flow run that comes after ``last``: one, however many ask for it at once.

        Where the one after ``last`` has ended already, or will not start soon, it is the one after
        that.
        """
        while True:
            key = f"{deployment} {name} after {last or 'none'}"
            run = await self.start(deployment, parameters, name=name, key=key)
            if run.is_active or run.id == last:
                return run
            last = run.id

    async def postpone(self, flow_run_id: str, seconds: float) -> bool:
        """Let a flow run that waits for its time start ``seconds`` from now.

        False: it does not wait, and another one is needed. It has ended, is not there, its pool was
        deleted, or a worker has taken it; that one is left as it is, because it would get a second
        process.
        """
        try:
            found = await self._call("GET", f"/flow_runs/{flow_run_id}")
            run = flow_run_from(found.json, found.at)
            if run.state not in ON_ITS_WAY or run.pool is None:
                return False
            state = _scheduled(found.at, seconds)
            if seconds:
                # Workers ask for flow runs when one becomes "Scheduled": this one can wait.
                state["name"] = _STANDING_BY
            body = {"state": state, "force": False}
            await self._call("POST", f"/flow_runs/{flow_run_id}/set_state", body)
        except Missing:
            return False
        return True

    async def mark_crashed(self, flow_run_id: str, message: str) -> None:
        """End a flow run whose process is gone, so that it frees its place in the work pool.

        One that has ended by itself meanwhile, or is no longer there, is left as it is.
        """
        await self._end(flow_run_id, "CRASHED", message)

    async def mark_completed(self, flow_run_id: str, message: str) -> None:
        """End a flow run whose work is done, and whose process could not say so."""
        await self._end(flow_run_id, "COMPLETED", message)

    async def mark_cancelled(self, flow_run_id: str, message: str) -> None:
        """Mark as cancelled a run that was being cancelled: Prefect takes no other end for it."""
        await self._end(flow_run_id, "CANCELLED", message)

    async def cancel(self, flow_run_id: str) -> None:
        """Ask for the end of a flow run; its worker carries it out."""
        await self._end(flow_run_id, "CANCELLING", "Nothing is left to do for it.")

    async def emit(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Hand over events, as Prefect has them. One whose ``id`` it knows is not taken twice."""
        await self._call("POST", "/events", list(events))

    async def _end(self, flow_run_id: str, state: str, message: str) -> None:
        body = {"state": {"type": state, "message": message}, "force": False}
        try:
            await self._call("POST", f"/flow_runs/{flow_run_id}/set_state", body)
        except Missing:
            return

    # -- looking ----------------------------------------------------------------------------

    async def latest(self, deployment: str, *, tag: str | None = None) -> FlowRun | None:
        """The newest flow run of ``flow/deployment``, of those that have ``tag``.

        Without those that are scheduled for later.
        """
        found = await self._call("GET", f"/deployments/name/{deployment}")
        soon = (found.at or datetime.now(UTC)) + timedelta(seconds=SOON_SECONDS)
        wanted: dict[str, Any] = {
            "deployment_id": {"any_": [found.json["id"]]},
            "expected_start_time": {"before_": soon.isoformat()},
        }
        if tag is not None:
            wanted["tags"] = {"all_": [tag]}
        # Prefect cannot sort by creation.
        body = {"flow_runs": wanted, "sort": "EXPECTED_START_TIME_DESC", "limit": _NEWEST_AMONG}
        answer = await self._call("POST", "/flow_runs/filter", body)
        newest = max(answer.json, key=lambda found: (found["created"], found["id"]), default=None)
        return flow_run_from(newest, answer.at) if newest else None

    async def active(self, deployment: str) -> list[FlowRun]:
        """The flow runs of ``flow/deployment`` that have begun, or are coming."""
        flow, name = deployment.split("/")
        found = await self._filter(
            {
                "flows": {"name": {"any_": [flow]}},
                "deployments": {"name": {"any_": [name]}},
                "flow_runs": {"state": {"type": {"any_": [*ON_ITS_WAY, *BEGUN]}}},
            }
        )
        return [run for run in found if run.is_active]

    async def begun(self, flows: Collection[str]) -> list[FlowRun]:
        """The flow runs that have begun and not ended: of a deployment, or of a batch runner.

        Others belong to a user's command.
        """
        found = await self._filter(
            {
                "flows": {"name": {"any_": list(flows)}},
                "flow_runs": {"state": {"type": {"any_": list(BEGUN)}}},
            }
        )
        return [run for run in found if run.is_deployed or TAKEN_UP in run.tags]

    async def find(self, flow_run_ids: Collection[str]) -> list[FlowRun]:
        """Those of the flow runs that there are."""
        if not flow_run_ids:
            return []
        return await self._filter({"flow_runs": {"id": {"any_": sorted(flow_run_ids)}}})

    async def named(self, name: str) -> list[FlowRun]:
        """The flow runs with this name."""
        return await self._filter({"flow_runs": {"name": {"any_": [name]}}})

    async def logs(self, flow_run_ids: Collection[str], limit: int) -> list[LogLine]:
        """The newest ``limit`` lines of these flow runs and their tasks, the oldest first."""
        lines: list[LogLine] = []
        wanted = {"flow_run_id": {"any_": sorted(flow_run_ids)}}
        while flow_run_ids and len(lines) < limit:
            size = min(_PAGE, limit - len(lines))
            body = {"logs": wanted, "sort": "TIMESTAMP_DESC", "limit": size, "offset": len(lines)}
            page = (await self._call("POST", "/logs/filter", body)).json
            lines += [log_line_from(found) for found in page]
            if len(page) < size:
                break
        return lines[::-1]

    async def has_pool(self, pool: str) -> bool:
        """Whether there is a work pool of that name."""
        try:
            await self._call("GET", f"/work_pools/{pool}")
        except Missing:
            return False
        return True

    async def pool_limit(self, pool: str) -> int | None:
        """How many flow runs the work pool runs at a time; None: as many as there are."""
        limit = (await self._call("GET", f"/work_pools/{pool}")).json.get("concurrency_limit")
        return None if limit is None else int(limit)

    async def has_lost_its_worker(self, run: FlowRun) -> bool:
        """Whether the worker process that took a pending flow run is surely gone.

        In a pool of type ``process`` a run is the child of its worker: where no worker is online
        that was there when the run became pending, nothing will come of it. Elsewhere, and where
        Prefect does not say, the answer is False.
        """
        if run.state != "PENDING" or run.pool is None:
            return False
        try:
            if (await self._call("GET", f"/work_pools/{run.pool}")).json.get("type") != "process":
                return False
            answer = await self._call("POST", f"/work_pools/{run.pool}/workers/filter", {})
        except Missing:
            return False
        if answer.at is None:
            return False
        pending_since = answer.at.timestamp() - run.state_seconds
        return not any(
            worker.get("status") == "ONLINE"
            and datetime.fromisoformat(worker["created"]).timestamp() <= pending_since
            for worker in answer.json
        )

    async def offered_models(self) -> list[OfferedModel]:
        """The models of the engine blocks, by name; each once."""
        wanted = {"block_types": {"slug": {"any_": list(ENGINE_BLOCKS)}}}
        documents: list[Mapping[str, Any]] = []
        while True:
            body = {**wanted, "limit": _PAGE, "offset": len(documents)}
            page = (await self._call("POST", "/block_documents/filter", body)).json
            documents += page
            if len(page) < _PAGE:
                break
        # Of two blocks for a model, the runner takes the one of the first type.
        documents.sort(key=lambda document: ENGINE_BLOCKS.index(_block_type(document)))
        by_model: dict[str, list[Mapping[str, Any]]] = {}
        for document in documents:
            name = (document.get("data") or {}).get("model")
            if isinstance(name, str) and name:
                by_model.setdefault(name, []).append(document)
        return [
            offered_model_from(
                by_model[name], is_ours=_block_type(by_model[name][0]) == ENGINE_BLOCKS[0]
            )
            for name in sorted(by_model)
        ]

    async def _filter(self, wanted: Mapping[str, Any]) -> list[FlowRun]:
        runs: list[FlowRun] = []
        while True:
            body = {**wanted, "sort": "ID_DESC", "limit": _PAGE, "offset": len(runs)}
            answer = await self._call("POST", "/flow_runs/filter", body)
            runs += [flow_run_from(found, answer.at) for found in answer.json]
            if len(answer.json) < _PAGE:
                return runs


def _block_type(document: Mapping[str, Any]) -> str:
    slug = str((document.get("block_type") or {}).get("slug"))
    return slug if slug in ENGINE_BLOCKS else ENGINE_BLOCKS[-1]


def _scheduled(now: datetime | None, after_seconds: float) -> dict[str, Any]:
    """The state of a flow run that starts ``after_seconds`` from now, by the server's clock."""
    if not after_seconds:
        return {"type": "SCHEDULED"}
    time = (now or datetime.now(UTC)) + timedelta(seconds=after_seconds)
    return {"type": "SCHEDULED", "state_details": {"scheduled_time": time.isoformat()}}
