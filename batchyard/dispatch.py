"""Flow runs, started and watched over Prefect's REST API: the only file that knows Prefect exists.

It speaks HTTP, so that a process that only has to wake a runner never imports Prefect.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import stamina

from batchyard.errors import DispatchFailed, EngineStartFailed, SettingsError
from batchyard.lifecycle import BatchStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.store import Store

logger = logging.getLogger(__name__)

RUN_CHUNKS = "run-chunks/default"
PROCESS_BATCH = "process-batch/default"

_TIMEOUT_SECONDS = 30
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 2.0
_BEGIN_SECONDS = 60.0
"""A flow run that began so recently may not have announced itself in the database yet."""
_ENDS_WITHOUT_ANSWER = 3
"""So many runners in a row may end without one answer before the wait is given up."""


@dataclass(frozen=True, slots=True)
class FlowRun:
    """``state`` is Prefect's type: ``SCHEDULED``, ``PENDING``, ``RUNNING``, ``COMPLETED`` …"""

    id: str
    state: str
    message: str = ""
    running_seconds: float = 0.0
    """How long it has been running, by the server's clock."""

    @property
    def has_ended(self) -> bool:
        return self.state not in {"SCHEDULED", "PENDING", "RUNNING"}

    @property
    def is_late(self) -> bool:
        """It has been running for so long that it must be in the database."""
        return self.state == "RUNNING" and self.running_seconds >= _BEGIN_SECONDS


class _Busy(DispatchFailed):
    """Prefect did nothing, and says that it will later."""


class PrefectApi:
    """The few calls that Batchyard needs. Use as an async context manager.

    Raises :class:`~batchyard.errors.DispatchFailed` when the server does not do as asked, and
    :class:`~batchyard.errors.SettingsError` where asking again cannot help.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
            trust_env=False,
        )

    @classmethod
    def from_environment(cls) -> Self:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def start(
        self,
        deployment: str,
        parameters: Mapping[str, Any],
        *,
        name: str,
        key: str | None = None,
    ) -> FlowRun:
        """Start ``flow/deployment`` under ``name``, which is its tag as well.

        Whoever asks with the same ``key`` gets the same flow run.
        """
        body = {
            "name": name,
            "tags": [name],
            "parameters": dict(parameters),
            "state": {"type": "SCHEDULED"},
            "idempotency_key": key or secrets.token_hex(16),
        }
        deployment_id = await self._deployment_id(deployment)
        return _flow_run(
            await self._call("POST", f"/deployments/{deployment_id}/create_flow_run", body)
        )

    async def latest(self, deployment: str, *, tag: str) -> FlowRun | None:
        """The newest flow run of ``flow/deployment`` that has ``tag``."""
        body = {
            "flow_runs": {
                "deployment_id": {"any_": [await self._deployment_id(deployment)]},
                "tags": {"all_": [tag]},
            },
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1,
        }
        runs = await self._call("POST", "/flow_runs/filter", body)
        return _flow_run(runs[0]) if runs else None

    async def mark_crashed(self, flow_run_id: str, message: str) -> None:
        """End a flow run whose process is gone, so that it frees its place in the work pool."""
        state = {"type": "CRASHED", "message": message}
        await self._call(
            "POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": True}
        )

    async def _deployment_id(self, deployment: str) -> str:
        return str((await self._call("GET", f"/deployments/name/{deployment}"))["id"])

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """One call; a server that is busy (its SQLite is locked) is asked again for a while."""
        async for attempt in stamina.retry_context(on=_Busy, attempts=8, timeout=_TIMEOUT_SECONDS):
            with attempt:
                return await self._call_once(method, path, body)
        raise AssertionError("a retry context returns or raises")

    async def _call_once(self, method: str, path: str, body: Any) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                if response.status in {401, 403}:
                    raise SettingsError(
                        f"The Prefect server at {self._url} refuses us (HTTP {response.status}): "
                        "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
                    )
                if response.status == 404:
                    raise SettingsError(
                        f"The Prefect server at {self._url} has no {path}: run "
                        "`prefect --no-prompt deploy --all`, and see that PREFECT_API_URL "
                        "ends in /api."
                    )
                if response.status in {429, 503}:
                    raise _Busy(f"Prefect is too busy: it answers {response.status} to {path}.")
                if not response.ok:
                    raise DispatchFailed(f"Prefect answered {response.status} to {path}.")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise DispatchFailed(
                f"The Prefect server at {self._url} did not answer: {reason}."
            ) from error


def _flow_run(found: Mapping[str, Any]) -> FlowRun:
    state = found.get("state") or {}
    return FlowRun(
        id=str(found["id"]),
        state=str(state.get("type")),
        message=str(state.get("message") or ""),
        running_seconds=float(found.get("estimated_run_time") or 0.0),
    )


async def wake_runner(
    api: PrefectApi, store: Store, model: str, *, silent_seconds: float
) -> FlowRun | None:
    """See to it that a runner serves ``model``; the flow run that is about to be one.

    None when one is alive already: it gave a sign of life in the last ``silent_seconds``. Of
    callers at once all get the same flow run, so that a GPU is never asked for two engines.
    """
    if await store.runners.live(model, silent_seconds):
        return None
    last = await api.latest(RUN_CHUNKS, tag=model)
    if last is not None and not last.has_ended:
        return last
    return await _start_after(api, model, last)


async def _start_after(api: PrefectApi, model: str, last: FlowRun | None) -> FlowRun:
    """The one flow run that comes after ``last``, whoever asks for it."""
    key = f"run-chunks {model} after {last.id if last else 'none'}"
    return await api.start(RUN_CHUNKS, {"model": model}, name=model, key=key)


class RunnerWatch:
    """Keeps a runner at work for somebody who waits for its answers.

    A runner that has gone is replaced. One that failed, or three in a row that ended without a
    single answer, end the wait with :class:`~batchyard.errors.EngineStartFailed`.
    """

    def __init__(self, api: PrefectApi, store: Store, model: str, *, silent_seconds: float) -> None:
        self._api = api
        self._store = store
        self._model = model
        self._silent_seconds = silent_seconds
        self._awaited: str | None = None
        self._silent: str | None = None
        self._answered = 0
        self._ends = 0

    async def look(self, answered: int) -> None:
        """Look once. ``answered`` is how many requests have their answer by now."""
        if await self._store.runners.live(self._model, self._silent_seconds):
            return
        last = await self._api.latest(RUN_CHUNKS, tag=self._model)
        if last is not None and last.is_late:
            last = await self._bury(last)
        if last is not None and not last.has_ended:
            self._awaited = last.id
            return
        if last is not None and last.id == self._awaited:
            self._count_end(last, answered)
        self._awaited = (await _start_after(self._api, self._model, last)).id
        logger.info("runner.started model=%s flow_run=%s", self._model, self._awaited)

    async def _bury(self, run: FlowRun) -> FlowRun:
        """Prefect believes that it runs, and keeps its place in the pool; its process is gone.

        Only at the second look: one that has just retired is about to tell Prefect.
        """
        if self._silent != run.id:
            self._silent = run.id
            return run
        message = "The runner gives no sign of life: its process is gone."
        await self._api.mark_crashed(run.id, message)
        return replace(run, state="CRASHED", message=message)

    def _count_end(self, ended: FlowRun, answered: int) -> None:
        if ended.state == "FAILED":
            raise EngineStartFailed(
                ended.message or f"The runner of {self._model}, flow run {ended.id}, failed."
            )
        self._ends = 1 if answered > self._answered else self._ends + 1
        self._answered = answered
        how = f"{ended.state.lower()} ({ended.message or 'no message'})"
        logger.warning("runner.ended model=%s flow_run=%s %s", self._model, ended.id, how)
        if self._ends >= _ENDS_WITHOUT_ANSWER:
            raise EngineStartFailed(
                f"{self._ends} runners of the model {self._model} ended one after the other "
                f"without an answer. The last one, flow run {ended.id}, is {how}. "
                "Do the workers of the GPU pool use the database of this batch?"
            )


async def await_chunks_done(
    api: PrefectApi, store: Store, batch_id: str, *, silent_seconds: float
) -> int:
    """The requests answered, once runners have done every chunk of the batch.

    Returns early when the batch is no longer in progress (cancelled, overdue, failed). That
    Prefect's API is away for a while ends nothing: runners work without it.
    """
    model = str((await store.batches.get(batch_id)).model)
    watch = RunnerWatch(api, store, model, silent_seconds=silent_seconds)
    looked_at = float("-inf")
    while True:
        batch = await store.batches.get(batch_id)
        chunks = await store.chunks.summary(batch_id)
        answered = chunks.completed + chunks.failed
        if batch.status is not BatchStatus.IN_PROGRESS or not (chunks.pending or chunks.leased):
            return answered
        if chunks.pending and time.monotonic() - looked_at >= _LOOK_SECONDS:
            looked_at = time.monotonic()
            try:
                await watch.look(answered)
            except DispatchFailed as error:
                logger.warning("runner.unknown model=%s %s", model, error)
        await asyncio.sleep(_POLL_SECONDS)
