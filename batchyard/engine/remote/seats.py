"""How many requests a server is taken to run at once if it does not say."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = 32
"""For a server that others use and that does not tell: fewer than vLLM has by default."""
UNKNOWN_EXCLUSIVE: Final = 256
"""For a server that no one else uses and that does not tell: a queue there keeps no one waiting."""
