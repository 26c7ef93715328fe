"""llama.cpp's own server, `llama-server`."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.gauges import Gauges
from batchyard.engine.kinds.kind import Known, Says, ServerKind, Usage, as_seats, dig

_PROPS: Final = "/props"
_SLOTS: Final = "total_slots"

KIND: Final = ServerKind(
    name="llama-server",
    known=Known(
        "b11063",
        is_run=True,
        works=("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        at_once="its slots (`--parallel`)",
    ),
    is_it=lambda pages: pages.owner == "llamacpp" or dig(pages.json(_PROPS), _SLOTS) is not None,
    seats_page=_PROPS,
    seats=lambda pages: as_seats(dig(pages.json(_PROPS), _SLOTS)),
    # It has metrics with `--metrics` only. Its counts of tokens stand still until a request ends.
    gauges=Gauges(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        progress=("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total"),
    ),
    usage=Usage.ONE_CHOICE,
    too_long=(Says(400, "exceed_context_size_error"),),
    busy=(Says(503, "unavailable_error"),),
)
