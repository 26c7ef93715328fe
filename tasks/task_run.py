"""The task run of a step. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

Prefect's own engine for tasks sends three events for each run (Pending, Running, its end), and
its server writes about ten rows for each event. Here a step that ends within a second sends one
event, its end; one that lasts sends its beginning too. Prefect's page of the flow run shows the
same: name, times, state, message. The step itself runs whether or not Prefect records it.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled, Completed, Failed, Running
from prefect.types._datetime import now

from batchyard.logs import event_logger
from batchyard.logs.log_words import describe

if TYPE_CHECKING:
    from prefect.events import Event
    from prefect.states import State

log = event_logger(__name__)

_SHOWN_AFTER_SECONDS: Final = 1.0


class RecordedTask:
    """The task run of the block: completed, failed or cancelled as the block is.

    ``kind`` is the same for all runs of a step, ``name`` is this run's, and may be changed until
    its end, as may ``message``. It belongs to the current flow run, or to ``flow_run_id``.
    Without a flow run nothing is recorded.
    """

    def __init__(self, kind: str, name: str, *, flow_run_id: str | None = None) -> None:
        self.name = name
        self.message: str | None = None
        """What the final state says."""
        self.has_failed = False
        """Whether the task run failed although the block ends without an error."""
        self._kind = kind
        self._flow_run_id = flow_run_id or current_flow_run.id
        self._id = uuid4()
        self._began = now("UTC")
        self._running: State[Any] | None = None
        self._last: Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SHOWN_AFTER_SECONDS, self._show_that_it_runs)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._record(self._end(error))

    def _end(self, error: BaseException | None) -> State[Any]:
        if isinstance(error, Exception):
            return Failed(message=describe(error))
        if error is not None:  # a cancellation, or a signal that ends the process
            return Cancelled(message=self.message)
        return Failed(message=self.message) if self.has_failed else Completed(message=self.message)

    def _show_that_it_runs(self) -> None:
        self._running = Running(timestamp=self._began)
        self._record(self._running)

    def _record(self, state: State[Any]) -> None:
        """Send the event of a state. What goes wrong in Prefect is not the step's matter."""
        if self._flow_run_id is None:
            return
        try:
            # Of the process's own flow run Prefect would add what each event can do without: its
            # flow, deployment, pool, queue and tags, each a row in Prefect's database.
            self._last = copy_context().run(self._send, state)
        except Exception as error:  # noqa: BLE001 - Prefect's, of any kind
            log.warning("task_run.not_recorded", type(error).__name__, step=self._kind)

    def _send(self, state: State[Any]) -> Event | None:
        FlowRunContext.__var__.set(None)  # type: ignore[arg-type]  # what `get` returns without one
        before = self._running if state is not self._running else None
        return emit_event(
            event=f"prefect.task-run.{state.name}",
            id=state.id,
            occurred=state.timestamp,
            resource={
                "prefect.resource.id": f"prefect.task-run.{self._id}",
                "prefect.resource.name": self.name,
                "prefect.run-count": "1",
                "prefect.state-message": state.message or "",
                "prefect.state-name": state.name or "",
                "prefect.state-timestamp": state.timestamp.isoformat(),
                "prefect.state-type": state.type.value,
                # So that Prefect's server makes a task run of it.
                "prefect.orchestration": "client",
            },
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                    "prefect.resource.role": "flow-run",
                }
            ],
            payload={
                "intended": {"from": before and before.type.value, "to": state.type.value},
                "initial_state": before and {"type": before.type.value, "name": before.name},
                "validated_state": {
                    "type": state.type.value,
                    "name": state.name,
                    "message": state.message,
                    "state_details": {},
                },
                "task_run": self._task_run(state),
            },
            follows=self._last,
        )

    def _task_run(self, state: State[Any]) -> dict[str, Any]:
        seconds = (state.timestamp - self._began).total_seconds() if state.is_final() else 0.0
        times = {"start_time": self._began.isoformat()}
        if state.is_final():
            times["end_time"] = state.timestamp.isoformat()
        return {
            "name": self.name,
            "task_key": self._kind,
            "dynamic_key": str(self._id),
            "run_count": 1,
            "flow_run_run_count": 1,
            "expected_start_time": self._began.isoformat(),
            "total_run_time": seconds,
            **times,
        }
