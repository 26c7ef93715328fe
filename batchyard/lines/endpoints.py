"""Every endpoint that a line of a batch may name, and all that Batchyard knows about each.

A new endpoint is a new row here, and a row of the table in ``docs/input-format.md``. Which of them
an engine serves with its model shows when the line is run; what no vLLM serves is known before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection


class Repeats(Enum):
    """Whether identical requests to an endpoint get identical answers."""

    SAME = "same"
    """Always: the answer is computed, and nothing in it is drawn at random."""
    SAMPLED = "sampled"
    """Only if the body asks for it, by its temperature or seed: the answer is sampled."""
    OWN = "own"
    """Never: each answer is a work of its own."""


_PLAIN: Final = ("input", "messages", "data", "prompt")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What Batchyard knows about one endpoint.

    ``required``: the body fields that it cannot do without. Each entry is a choice of fields, all
    of which must be there; the first choice is the one that a message names.
    ``prompt``: the body fields that make the prompt, in the order in which it is rendered.
    ``is_conversation``: a chat template renders them, with roles, tools and instructions.
    """

    required: tuple[tuple[str, ...], ...]
    repeats: Repeats
    prompt: tuple[str, ...] = _PLAIN
    is_conversation: bool = False
    writes_tokens: bool = False
    """The answer is made token by token, so the body may bound its length."""
    reads_recording: bool = False
    """The prompt is a recording, whose length is not known beforehand."""
    file_field: str | None = None
    """The field of the form for the file that the body names as ``file_url``; None: no form."""
    prompt_lists: tuple[str, ...] = ()
    """The body fields that may be lists of prompts, each of which the engine runs by itself. If
    several are, they are as long as each other, or all but one have one prompt."""
    limits_inputs: bool = False
    """The inputs of all lines together are limited, as OpenAI limits those of embeddings."""
    takes_seed: bool = False
    """The body may have a ``seed`` for what is drawn at random. vLLM ignores it elsewhere."""
    in_vllm: bool = True
    """vLLM serves it with some models. If not, only another server may."""

    @property
    def needs_file(self) -> bool:
        """Whether no request can do without a file, so that the engine takes nothing but forms."""
        return all("file_url" in choice for choice in self.required)


_EMBEDDINGS = Endpoint(
    (("input",), ("messages",)), Repeats.SAME, prompt_lists=("input",), limits_inputs=True
)
_SCORE = Endpoint(
    (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")),
    Repeats.SAME,
    # What is asked comes first: it is what the pairs of many requests share.
    prompt=("query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2"),
    prompt_lists=("queries", "text_1", "data_1", "documents", "items", "text_2", "data_2"),
)
_RERANK = Endpoint(
    (("query", "documents"),), Repeats.SAME, prompt=_SCORE.prompt, prompt_lists=("documents",)
)
_POOLING = Endpoint((("input",), ("messages",), ("data",)), Repeats.SAME, prompt_lists=("input",))
_SPEECH = Endpoint(
    (("file_url",),),
    Repeats.OWN,
    writes_tokens=True,
    reads_recording=True,
    file_field="file",
    takes_seed=True,
)
_PICTURE = Endpoint((("prompt",),), Repeats.OWN, in_vllm=False)

ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": Endpoint(
        (("messages",),),
        Repeats.SAMPLED,
        prompt=("tools", "messages"),
        is_conversation=True,
        writes_tokens=True,
        takes_seed=True,
    ),
    "/v1/completions": Endpoint(
        (("prompt",),),
        Repeats.SAMPLED,
        prompt=("prompt",),
        writes_tokens=True,
        prompt_lists=("prompt",),
        takes_seed=True,
    ),
    "/v1/responses": Endpoint(
        (("input",),),
        Repeats.SAMPLED,
        prompt=("tools", "instructions", "input"),
        is_conversation=True,
        writes_tokens=True,
        takes_seed=True,
    ),
    "/v1/messages": Endpoint(
        (("messages", "max_tokens"),),
        Repeats.SAMPLED,
        prompt=("tools", "system", "messages"),
        is_conversation=True,
        writes_tokens=True,
    ),
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/moderations": Endpoint((("input",),), Repeats.SAME, in_vllm=False),
    "/v1/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/v1/audio/transcriptions": _SPEECH,
    "/v1/audio/translations": _SPEECH,
    "/v1/images/generations": _PICTURE,
    "/v1/images/edits": Endpoint(
        (("prompt", "file_url"), ("prompt", "images")),
        Repeats.OWN,
        file_field="image",
        in_vllm=False,
    ),
    "/v1/videos": _PICTURE,
    "/v1/classify": _POOLING,
    "/v1/pooling": _POOLING,
    "/score": _SCORE,
    "/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/classify": _POOLING,
    "/pooling": _POOLING,
}
"""Path → endpoint, in the order in which they are listed to users."""
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
"""For live requests only: the answer is the length of a prompt, and nothing is generated."""
LIVE: Final = (
    *(path for path, each in ENDPOINTS.items() if path.startswith("/v1/") and not each.needs_file),
    COUNT_TOKENS,
)
"""The endpoints for live requests: those that need no form with a file."""
IN_VLLM: Final = frozenset(path for path, endpoint in ENDPOINTS.items() if endpoint.in_vllm)
"""What engines of ours may serve."""


def not_served_words(path: str, served: Collection[str]) -> str:
    """Why a batch for ``path`` is refused, and what it may ask for instead."""
    offer = ", ".join(each for each in ENDPOINTS if each in served)
    return f"No engine here serves {path}. They serve, depending on the model: {offer}."


def takes_form(path: str) -> bool:
    """Whether requests to ``path`` may be forms with a file."""
    endpoint = ENDPOINTS.get(path)
    return endpoint is not None and endpoint.file_field is not None
