"""Whether a request that is valid by the other rules fits in the engine's context. Pure.

Tokens are counted elsewhere, and how long the engine's context is comes from there too. Nothing is
refused here that vLLM 0.32 would run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from batchyard.lines.body_policy import Refusal
from batchyard.lines.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROMPT_FIELDS: Final = ("messages", "prompt", "input")
_LIMITS: Final[dict[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""The fields that limit an answer's tokens, by endpoint: the first one that is given counts."""


def context_refusals(
    url: str, body: dict[str, Any], longest: int | None, context: int | None
) -> Iterator[Refusal]:
    """What does not fit in a context of so many tokens; nothing where that is not known.

    ``longest``: the body's longest prompt has at least so many tokens; None: it was not counted.
    vLLM shortens an answer that would not fit behind its prompt, so their sum is not refused. It
    refuses a limit that is larger than the whole context, and a prompt that leaves no room for
    one token of an answer.
    """
    endpoint = ENDPOINTS.get(url)
    if context is None or endpoint is None:
        return
    if endpoint.writes_tokens:
        limits = _LIMITS.get(url, ())
        name = next((name for name in limits if body.get(name) is not None), None)
        limit = body.get(name or "")
        if type(limit) is int and limit > context:
            yield Refusal(
                "context_length_exceeded",
                f"body.{name} is {limit}, which is more than this model's maximum context length "
                f"of {context} tokens.",
                f"body.{name}",
            )
    most = context - 1 if endpoint.writes_tokens else context
    if longest is None or longest <= most or _is_truncated(body):
        return
    room = " and the answer needs at least 1" if longest == context else ""
    yield Refusal(
        "context_length_exceeded",
        f"This model's maximum context length is {context} tokens. However, your prompt has at "
        f"least {longest} tokens{room}. Please reduce the length of the prompt.",
        next((f"body.{name}" for name in _PROMPT_FIELDS if name in body), "body"),
    )


def _is_truncated(body: dict[str, Any]) -> bool:
    """Whether the engine is asked to cut the prompt."""
    truncation = body.get("truncation") not in (None, "disabled")
    return truncation or body.get("truncate_prompt_tokens") is not None
