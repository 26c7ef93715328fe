"""The server of llama-cpp-python, `python -m llama_cpp.server`."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.kind import Known, Says, ServerKind

_NO_EFFECT: Final = frozenset({"n", "user"})

KIND: Final = ServerKind(
    name="llama-cpp-python",
    known=Known(
        "0.3.33",
        is_run=True,
        works=("/v1/chat/completions", "/v1/completions"),
        at_once="one; found, from one on",
    ),
    is_it=lambda pages: isinstance(pages.title, str) and "llama.cpp Python API" in pages.title,
    # One model behind one lock: others wait until it is free.
    seats=lambda _: 1,
    seats_are_known=False,
    ignored={
        "/v1/chat/completions": _NO_EFFECT,
        "/v1/completions": _NO_EFFECT | {"best_of"},
        "/v1/embeddings": frozenset({"user"}),
    },
    too_long=(Says(400, "context_length_exceeded"),),
)
