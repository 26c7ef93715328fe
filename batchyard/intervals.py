"""Units of time, and how often processes look for work and for changes, and publish numbers.

No operator would change these, so they are constants. Read them as ``intervals.POLL_SECONDS``, so
that tests can shorten them.
"""

from __future__ import annotations

from typing import Final

MINUTE_SECONDS: Final = 60
HOUR_SECONDS: Final = 3_600
DAY_SECONDS: Final = 86_400
LOOK_SECONDS: Final = 1.0
"""How often a runner checks whether its batches were cancelled, paused or are overdue."""
POLL_SECONDS: Final = 0.25
"""How often a process with free capacity asks the database for work."""
BATCH_LEASE_SECONDS: Final = 30.0
"""How long a process owns a batch, at most, without renewing its lease."""
RESPONSES_SECONDS: Final = 0.5
"""How often background responses are collected, and looked for in results."""
RETRY_SECONDS: Final = 0.5
"""The pause before the second attempt of a request; it doubles with each further one."""
OCCUPANCY_SECONDS: Final = 3.0
"""How often a runner asks its engine how full it is; the page asks as often."""
LENGTHS_SECONDS: Final = 2.0
"""How often a runner writes what it has learned of the lengths of answers."""
ESTIMATE_SECONDS: Final = 0.5
"""How often a runner looks whether it knows enough more to estimate what is left of a batch."""
METRICS_SECONDS: Final = 2.0
"""How often a process writes its numbers for the exporter; Prometheus asks every 15 s or so."""
