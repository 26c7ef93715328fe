"""The names of flow runs' final states that the two sides of Prefect agree on.

A runner of chunks that ends with one of the first four is not to blame, and neither is its model.
"""

from __future__ import annotations

from typing import Final

NO_SLOT: Final = "NoSlot"
"""Other engines have every engine slot of the machine."""
PUT_OFF: Final = "PutOff"
"""The database, the object store or this machine's disk could not be used for now."""
MACHINE_PAUSED: Final = "MachinePaused"
"""Runners of the model failed on this machine before, and the next try there is not due yet."""
NO_ENGINE: Final = "NoEngine"
"""No engine block offers the model."""

UNDELIVERED: Final = "Undelivered"
"""The batch has ended, and a result file could not be written where it was wanted."""
TAKEN_OVER: Final = "TakenOver"
"""Another process has the batch."""
