"""How long tests wait for what must come: a limit ends a test that hangs, it measures nothing."""

from __future__ import annotations

from typing import Final

PATIENCE: Final = 5.0
"""How many times as long everything may take as on an idle machine: two slow cores may have ten
processes to run. What measures time does not use it, and is marked ``alone``."""
