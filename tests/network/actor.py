"""Processes as those of :mod:`tests.faults.actor`, with their object store in S3.

They wait for less time than the product's before they try again, so that a test need not.
"""

from __future__ import annotations

import boto3  # noqa: F401 - half a second for each process that is forked without it
import pytest

from batchyard.control import run_batches
from batchyard.delivery import deliver, schedule
from batchyard.services import patience
from batchyard.services.leases import held_batches
from tests.faults.actor import serve_nursery

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "PAUSE_SECONDS", 0.2)
        patch.setattr(held_batches, "AGAIN_AFTER_SECONDS", 0.5)
        patch.setattr(run_batches, "AGAIN_AFTER_SECONDS", 0.5)
        patch.setattr(deliver, "_LEASE_SECONDS", 2.0)
        patch.setattr(deliver, "_RENEW_SECONDS", 0.6)
        patch.setattr(schedule, "SCHEDULE_SECONDS", (1, 1, *schedule.SCHEDULE_SECONDS))
        serve_nursery()
