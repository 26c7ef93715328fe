"""`transformers serve`."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.kind import OPENAPI, Known, Says, ServerKind, dig

_PATHS: Final = frozenset({"/load_model", "/v1/chat/completions", "/v1/responses"})

KIND: Final = ServerKind(
    name="transformers serve",
    known=Known(
        "5.24.0",
        is_run=True,
        works=("/v1/chat/completions", "/v1/completions", "/v1/responses"),
        at_once="one; with `--continuous-batching` more, which it does not tell; found, "
        "from one on",
    ),
    is_it=lambda pages: (
        pages.title == "FastAPI" and set(dig(pages.json(OPENAPI), "paths") or ()) >= _PATHS
    ),
    # One after the other, unless it was started with `--continuous-batching`, which it does not
    # tell.
    seats=lambda _: 1,
    seats_are_known=False,
    ignored={
        "/v1/chat/completions": frozenset(
            {
                "audio",
                "function_call",
                "functions",
                "logprobs",
                "metadata",
                "modalities",
                "n",
                "parallel_tool_calls",
                "prediction",
                "presence_penalty",
                "reasoning_effort",
                "response_format",
                "service_tier",
                "store",
                "stream_options",
                "tool_choice",
                "top_logprobs",
                "user",
                "web_search_options",
            }
        ),
        "/v1/completions": frozenset(
            {"best_of", "echo", "logprobs", "n", "presence_penalty", "stream_options", "user"}
        ),
        "/v1/responses": frozenset(
            {
                "background",
                "include",
                "max_tool_calls",
                "previous_response_id",
                "prompt",
                "service_tier",
                "store",
                "text",
                "tool_choice",
                "top_logprobs",
                "truncation",
                "user",
            }
        ),
    },
    busy=(Says(503, "error"),),
    unknown_model=(Says(400, "Server is pinned to"),),
)
