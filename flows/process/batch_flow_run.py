"""Flow runs in `run-batches`. Not by Prefect's flow engine, which costs 3 times as much (ADR 74).

Each is created as running, and ended, by one call. Prefect's engine makes four calls more for each:
it changes the run twice, reads it, and sets it to running after it was created as pending. People
see the same without them: a name, tags, times, logs, task runs, artifacts, a final state.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.results import get_result_store
from prefect.states import Failed, Running, exception_to_crashed_state, to_state_create

from batchyard.errors import FlowRunNotMade
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from flows.process.prefect_client import get_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from uuid import UUID

    from prefect import Flow
    from prefect.client.orchestration import PrefectClient
    from prefect.states import State

log = event_logger(__name__)

_REFUSED: Final = range(400, 500)
_LAST_CALL_SECONDS: Final = 5.0
"""How long a process that has to stop waits for Prefect, whose client tries for a minute."""


@dataclass(frozen=True, slots=True)
class End:
    """How the work of a flow run ended."""

    state: State[Any]
    report: Callable[[], Awaitable[object]] | None = None
    """Shows people more of it. Nothing waits for it but the end of the flow run."""

    async def reported(self) -> State[Any]:
        """The state, once the rest is shown."""
        if self.report is not None:
            await self.report()
        return self.state


class FlowRuns:
    """Runs of ``flow``, whose work is given instead of its function."""

    def __init__(self, flow: Flow[Any, Any]) -> None:
        self._flow = flow
        self._flow_id: UUID | None = None

    async def run(
        self,
        work: Callable[[], Awaitable[End]],
        *,
        name: str,
        tags: Sequence[str],
        parameters: dict[str, Any],
    ) -> State[Any]:
        """Await ``work`` as a flow run that ends with the state that it returns; the state.

        An exception ends the flow run as failed, a cancellation as crashed; both are raised. If
        Prefect does not take the end, or no longer knows the flow run, only the log says so.
        Raises :class:`~batchyard.errors.FlowRunNotMade` before ``work`` begins.
        """
        async with get_client() as client:
            try:
                run = await self._create(
                    client,
                    name=name,
                    tags=list(tags),
                    parameters=parameters,
                    # Prefect's client asks again where an answer is lost.
                    idempotency_key=secrets.token_hex(16),
                )
            except Exception as error:
                raise FlowRunNotMade(f"Prefect made no flow run: {describe(error)}") from error
            try:
                with self._context(client, run):
                    end = await work()
                    # It finds its flow run in the context that it is made in.
                    reporting = asyncio.create_task(end.reported())
            except BaseException as error:
                await _show_soon(client, run, await _state_after(error))
                raise
            try:
                await asyncio.gather(_show(client, run, end.state), reporting)
            except asyncio.CancelledError:
                await _show_soon(client, run, end.state)
                raise
        return end.state

    async def _create(self, client: PrefectClient, **fields: Any) -> FlowRun:
        # Prefect's client would look for the flow each time.
        if (flow_id := self._flow_id) is not None:
            try:
                return await self._create_of(client, flow_id, **fields)
            except PrefectHTTPStatusError as error:
                # A server whose database was made again does not know the flow.
                if error.response.status_code not in _REFUSED:
                    raise
        self._flow_id = await client.create_flow(self._flow)
        return await self._create_of(client, self._flow_id, **fields)

    async def _create_of(self, client: PrefectClient, flow_id: UUID, **fields: Any) -> FlowRun:
        wanted = FlowRunCreate(
            flow_id=flow_id,
            flow_version=self._flow.version,
            state=to_state_create(Running()),
            **fields,
        )
        body = wanted.model_dump(mode="json", exclude_unset=True)
        answer = await client.request("POST", "/flow_runs/", json=body)
        return FlowRun.model_validate(answer.json())

    def _context(self, client: PrefectClient, run: FlowRun) -> FlowRunContext:
        """What Prefect's functions, its log handler and our tasks find as the current flow run."""
        return FlowRunContext(
            flow=self._flow,
            flow_run=run,
            parameters=run.parameters,
            client=client,
            task_runner=self._flow.task_runner,
            result_store=get_result_store(),
            persist_result=False,
        )


async def _state_after(error: BaseException) -> State[Any]:
    if isinstance(error, Exception):
        return Failed(message=describe(error))
    return await exception_to_crashed_state(error)


async def _show(client: PrefectClient, run: FlowRun, state: State[Any]) -> None:
    """Show the end. What the flow run was for is done, whatever Prefect says."""
    try:
        await client.set_flow_run_state(run.id, state, force=True)
    except Exception as trouble:  # noqa: BLE001 - Prefect's, of any kind
        log.warning("flow_run.not_changed", type(trouble).__name__)


async def _show_soon(client: PrefectClient, run: FlowRun, state: State[Any]) -> None:
    """Show the end, if Prefect lets us soon: an error is on its way."""
    try:
        async with asyncio.timeout(_LAST_CALL_SECONDS):
            await _show(client, run, state)
    except TimeoutError as trouble:
        log.warning("flow_run.not_changed", type(trouble).__name__)
