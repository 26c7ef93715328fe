"""Infinity, `infinity_emb v2`: embeddings, reranking and classification."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.kind import MODELS, Known, Says, ServerKind, Usage, as_seats, dig

KIND: Final = ServerKind(
    name="Infinity",
    known=Known(
        "0.0.78",
        is_run=True,
        works=("/v1/embeddings",),
        at_once="found, from a quarter of the texts of one batch (`--batch-size`) on",
    ),
    is_it=lambda pages: pages.owner == "infinity",
    seats_page=MODELS,
    # It makes batches of so many texts, of whatever requests, and prepares others meanwhile.
    seats=lambda pages: as_seats(dig(pages.json(MODELS), "data", 0, "stats", "batch_size")),
    seats_are_known=False,
    without_v1=True,
    ignored={"/v1/embeddings": frozenset({"user"})},
    usage=Usage.CHARACTERS,
    # A longer text is cut at the model's length, without a word.
    busy=(Says(429, "is currently overloaded"),),
)
