"""The names of final states that one flow run sets and another process acts on.

A state's name is protocol; its message is for people, and nothing is decided by it.
"""

from __future__ import annotations

from typing import Final

# Of runners of chunks, all ``Completed``: neither the runner nor its model is to blame.
NO_SLOT: Final = "NoSlot"
"""Other engines have every engine slot of the machine."""
MACHINE_PAUSED: Final = "MachinePaused"
"""Runners of the model failed on this machine before, and the next try there is not due yet."""
NO_ENGINE: Final = "NoEngine"
"""No engine block offers the model."""
STOPPED: Final = "Stopped"
"""The process got SIGTERM: its worker, pod or machine is stopped. Also of a run of many batches."""

PUT_OFF: Final = "PutOff"
"""The run cannot go on for now: the database, the object store or this machine's disk.

``Completed`` of a runner of chunks, ``Failed`` of the run of a batch.
"""

IN_QUEUE: Final = "InQueue"
"""What the names of states begin with whose flow run waits in a cluster's queue.

``Pending``: its job waits, for the reason behind the word. ``Scheduled``: the cluster did not take
its job yet. Each reason is another name, because Prefect lets a flow run go from one ``Pending`` to
another only where the name changes, and never from ``Running``: the job may start at any moment.
"""

# Of the run of a batch, all ``Completed``.
AWAITS_ROOM: Final = "AwaitsRoom"
"""The batch waits until its tenant's quota has room for it."""
TAKEN_OVER: Final = "TakenOver"
"""Another process has the batch."""
UNPUBLISHED: Final = "Unpublished"
"""A result file could not be written to the place that was asked for."""


def in_queue(reason: str) -> str:
    """The name of the state of a flow run that waits in a cluster's queue for this reason."""
    return f"{IN_QUEUE} ({reason})"


def is_in_queue(state_name: str) -> bool:
    """Whether a state has such a name."""
    return state_name.startswith(IN_QUEUE)
