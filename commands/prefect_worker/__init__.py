"""Prefect's worker, but its flow runs are forked: Prefect's own start takes seconds (ADR 74).

Prefect starts two Python interpreters for each flow run, one after the other, which import Prefect
and the flows again: about three seconds of processor time. A fork of a process that has imported
them takes some milliseconds. See docs/adr/0045-flow-runs-are-forked.md.
"""

from __future__ import annotations

import sys
from typing import Final

PREFECT_WORKER: Final = (sys.executable, "-P", "-m", "commands.prefect_worker", "worker", "start")
"""The words to start it with, which Prefect's own options follow.

Without ``-P``, a user's own `commands.py` or `tasks.py` in the current folder would be imported
instead of ours. Like Prefect's own command, it finds flows where their deployments say."""
