"""What Prefect's REST API answers, as values; above all a flow run, and whether it is late."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from batchyard.dispatch.run_states import is_in_queue
from batchyard.lines.offer import Offer
from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ON_ITS_WAY = ("SCHEDULED",)
BEGUN = ("PENDING", "RUNNING", "CANCELLING")
_LATE_SECONDS = {"RUNNING": 60.0, "CANCELLING": 120.0}
"""A flow run that is in such a state for so long is in our database, or has no process."""
PENDING_SECONDS = 120.0
"""How long a process on a machine that is there may take to begin."""
SOON_SECONDS = 60.0
"""A flow run that is to start later than this starts for another reason: somebody scheduled it."""


@dataclass(frozen=True, slots=True)
class FlowRun:
    """``state`` is Prefect's type: ``SCHEDULED``, ``PENDING``, ``RUNNING``, ``COMPLETED`` …"""

    id: str
    state: str
    state_name: str = ""
    """Prefect's name of the state, for example ``Completed``, or one that a flow gave it."""
    message: str = ""
    state_seconds: float = 0.0
    """How long it has been in this state, by the server's clock, to a second."""
    tags: tuple[str, ...] = ()
    model: str | None = None
    """The value of its parameter ``model``."""
    pool: str | None = None
    """The work pool that it was sent to."""
    is_deployed: bool = False
    """Whether it belongs to a deployment."""
    starts_after_seconds: float = 0.0
    """For one that waits for its time: how long that is, by the server's clock."""

    @property
    def is_coming(self) -> bool:
        """Whether it waits for a worker that can take it soon.

        Not one that somebody has scheduled for later, by hand or with a schedule, nor one whose
        work pool was deleted: no worker ever takes it, also not of a new pool of that name.
        """
        is_soon = self.starts_after_seconds <= SOON_SECONDS
        return self.state in ON_ITS_WAY and self.pool is not None and is_soon

    @property
    def is_active(self) -> bool:
        """Whether it has begun and not ended, or is coming."""
        return self.is_coming or self.state in BEGUN

    @property
    def is_in_queue(self) -> bool:
        """Whether it waits for a node of a cluster; ``message`` says what the cluster says."""
        return not self.has_ended and is_in_queue(self.state_name)

    @property
    def has_ended(self) -> bool:
        """Whether the flow run is in one of Prefect's terminal states."""
        return self.state not in {*ON_ITS_WAY, *BEGUN}

    def is_late(self, *, pending_seconds: float = PENDING_SECONDS) -> bool:
        """It has been in its state for so long that its process must be in the database.

        ``pending_seconds`` is how long it may take to begin, once a cluster has given it a node.
        """
        if self.is_in_queue:
            return False
        limits = {**_LATE_SECONDS, "PENDING": pending_seconds}
        return self.state_seconds >= limits.get(self.state, float("inf"))


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that a block says how to serve; ``created_at`` of the block, Unix seconds."""

    name: str
    created_at: int
    hours: Hours | None = ALWAYS
    """When batches may use its engine; None: what the block says of it means nothing."""
    is_live: bool = False
    """Its engine takes live requests beside those of batches."""
    is_ours: bool = False
    """Its engine is a vLLM that Batchyard starts; otherwise a server of which nothing is known."""
    weights: str = ""
    """The folder or hub id that an engine of ours loads."""
    options: str = ""
    """The options of an engine of ours, as in a shell."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment variables that an engine of ours has for itself."""
    adapters: tuple[str, ...] = ()
    """The names of its adapters."""


def offered_model_from(
    documents: Sequence[Mapping[str, Any]], *, is_ours: bool = False
) -> OfferedModel:
    """The model of these engine blocks, which all name it; the first of them is the one used."""
    created = min(datetime.fromisoformat(each["created"]) for each in documents)
    data = documents[0]["data"]
    try:
        windows = msgspec.convert(data.get("batch_hours") or (), tuple[HoursWindow, ...])
    except msgspec.ValidationError:
        hours = None
    else:
        hours = Hours(windows)
    found = OfferedModel(
        data["model"],
        int(created.timestamp()),
        hours,
        is_live=data.get("live") is True,
        is_ours=is_ours,
        adapters=_adapters_of(data),
    )
    if not is_ours:
        return found
    return replace(
        found,
        weights=data.get("weights") or data["model"],
        options=data.get("options") or "",
        environment=data.get("environment") or {},
    )


def _adapters_of(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a list, or in a table of paths; none where the block says anything else."""
    adapters = data.get("adapters")
    if not isinstance(adapters, dict | list):
        return ()
    return tuple(name for name in adapters if isinstance(name, str) and name)


def offer_of(models: Iterable[OfferedModel]) -> Offer:
    """The names that lines may carry where these are all models."""
    return Offer.of({model.name: model.adapters for model in models})


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of Prefect's log of a flow run; ``at`` in Unix seconds."""

    at: float
    level: str
    logger: str
    message: str


def log_line_from(found: Mapping[str, Any]) -> LogLine:
    """A line as ``/logs/filter`` has it."""
    return LogLine(
        at=datetime.fromisoformat(found["timestamp"]).timestamp(),
        level=logging.getLevelName(int(found["level"])),
        logger=str(found["name"]),
        message=str(found["message"]),
    )


def flow_run_from(found: Mapping[str, Any], at: datetime | None) -> FlowRun:
    """``at``: the moment at which the server said so, for how long it has been in its state."""
    state = found.get("state") or {}
    since, start = state.get("timestamp"), found.get("next_scheduled_start_time")
    seconds = starts_after = 0.0
    if at is not None and since:
        # A state that begins long after now is from before the server's clock was set back. It must
        # not count as new for hours: it keeps a place, and the process that had it may be gone.
        seconds = abs((at - datetime.fromisoformat(since)).total_seconds())
    if at is not None and start:
        starts_after = max(0.0, (datetime.fromisoformat(start) - at).total_seconds())
    return FlowRun(
        id=str(found["id"]),
        state=str(state.get("type")),
        state_name=str(state.get("name") or ""),
        message=str(state.get("message") or ""),
        state_seconds=seconds,
        tags=tuple(found.get("tags") or ()),
        model=(found.get("parameters") or {}).get("model"),
        pool=found.get("work_pool_name"),
        is_deployed=found.get("deployment_id") is not None,
        starts_after_seconds=starts_after,
    )
