"""Flow runs, started and watched over Prefect's REST API: the only file that knows Prefect exists.

It speaks HTTP, so that a process that only has to wake a runner never imports Prefect.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from batchyard.errors import DispatchFailed, EngineStartFailed, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.store import Store

RUN_CHUNKS = "run-chunks/default"
PROCESS_BATCH = "process-batch/default"

_STARTING = ["SCHEDULED", "PENDING"]
_TIMEOUT_SECONDS = 30
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 5.0
_RUNNER_SILENT_SECONDS = 120.0
"""A runner without a heartbeat for so long is not counted on."""


@dataclass(frozen=True, slots=True)
class FlowRunState:
    """``type`` is Prefect's: ``SCHEDULED``, ``RUNNING``, ``COMPLETED``, ``FAILED`` …"""

    type: str
    message: str


class PrefectApi:
    """The few calls that Batchyard needs. Use as an async context manager."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
            trust_env=False,
        )

    @classmethod
    def from_environment(cls) -> PrefectApi:
        """The server that ``PREFECT_API_URL`` names, as Prefect's own clients find it."""
        url = os.environ.get("PREFECT_API_URL")
        if not url:
            raise SettingsError(
                "PREFECT_API_URL is not set: say where the Prefect server is, "
                "for example http://127.0.0.1:4200/api."
            )
        headers = {}
        if key := os.environ.get("PREFECT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        elif login := os.environ.get("PREFECT_API_AUTH_STRING"):
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return cls(url, headers)

    async def __aenter__(self) -> PrefectApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def start(self, deployment: str, parameters: Mapping[str, Any], *, tag: str) -> str:
        """Start ``flow/deployment``; the flow run's id."""
        found = await self._call("GET", f"/deployments/name/{deployment}")
        run = await self._call(
            "POST",
            f"/deployments/{found['id']}/create_flow_run",
            {"parameters": dict(parameters), "tags": [tag], "state": {"type": "SCHEDULED"}},
        )
        return str(run["id"])

    async def starting(self, deployment: str, *, tag: str) -> list[str]:
        """The flow runs with ``tag`` that have not begun yet."""
        found = await self._call("GET", f"/deployments/name/{deployment}")
        runs = await self._call(
            "POST",
            "/flow_runs/filter",
            {
                "flow_runs": {
                    "deployment_id": {"any_": [found["id"]]},
                    "state": {"type": {"any_": _STARTING}},
                    "tags": {"all_": [tag]},
                },
                "limit": 10,
            },
        )
        return [str(run["id"]) for run in runs]

    async def state(self, flow_run_id: str) -> FlowRunState:
        run = await self._call("GET", f"/flow_runs/{flow_run_id}")
        state = run.get("state") or {}
        return FlowRunState(str(state.get("type")), str(state.get("message") or ""))

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                if response.status == 404:
                    raise DispatchFailed(
                        f"Prefect knows nothing at {path}: run `prefect deploy --all` first."
                    )
                if not response.ok:
                    raise DispatchFailed(f"Prefect answered {response.status} to {path}.")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise DispatchFailed(
                f"The Prefect server at {self._url} did not answer: {reason}."
            ) from error


async def wake_runner(api: PrefectApi, store: Store, model: str) -> str | None:
    """See to it that a runner serves ``model``; the flow run that was started or is starting.

    None when one is alive already. Two callers at once may start two runners: that costs a slot
    for a while, never a chunk, for chunks are leased.
    """
    if await store.runners.live(model, _RUNNER_SILENT_SECONDS):
        return None
    starting = await api.starting(RUN_CHUNKS, tag=model)
    return starting[0] if starting else await api.start(RUN_CHUNKS, {"model": model}, tag=model)


async def await_chunks_done(api: PrefectApi, store: Store, batch_id: str) -> int:
    """Return the requests answered once runners have done every chunk of the batch.

    Looks after the runner on the way: one that died is replaced, and one whose engine cannot be
    started ends the wait. Raises :class:`~batchyard.errors.EngineStartFailed` then.
    """
    model = str((await store.batches.get(batch_id)).model)
    started: str | None = None
    looked_at = 0.0
    while True:
        chunks = await store.chunks.summary(batch_id)
        if chunks.pending == 0 and chunks.leased == 0:
            return chunks.completed + chunks.failed
        if chunks.pending and time.monotonic() - looked_at >= _LOOK_SECONDS:
            looked_at = time.monotonic()
            if started is not None:
                state = await api.state(started)
                if state.type == "FAILED":
                    raise EngineStartFailed(state.message)
            started = await wake_runner(api, store, model) or started
        await asyncio.sleep(_POLL_SECONDS)
