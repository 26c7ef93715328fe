"""A server that no module here knows: what is said of it is what harms no server.

It may be a vLLM behind a gateway, so its metrics and its seats are looked for as vLLM has them.
"""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds import vllm
from batchyard.engine.kinds.kind import Says, ServerKind, Usage

KIND: Final = ServerKind(
    name="unknown",
    seats_page=vllm.SEATS_PAGE,
    seats=vllm.seats_of,
    gauges=vllm.GAUGES,
    usage=Usage.NOT_KNOWN,
    unknown_model=(Says(404, ""),),
)
