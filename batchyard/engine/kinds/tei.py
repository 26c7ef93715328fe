"""Text Embeddings Inference, `text-embeddings-router`."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.kind import Known, Says, ServerKind, as_seats, dig

_INFO: Final = "/info"

KIND: Final = ServerKind(
    name="Text Embeddings Inference",
    known=Known(
        "1.9.3",
        is_run=False,
        works=("/v1/embeddings",),
        at_once="`--max-batch-requests`, if it was given; else found",
    ),
    is_it=lambda pages: dig(pages.json(_INFO), "max_client_batch_size") is not None,
    seats_page=_INFO,
    # What it takes at once, `max_concurrent_requests`, is mostly a queue.
    seats=lambda pages: as_seats(dig(pages.json(_INFO), "max_batch_requests")),
    too_long=(Says(422, "must have less than"),),
    busy=(Says(429, "Model is overloaded"),),
)
