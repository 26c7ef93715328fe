"""How many sequences an engine runs for one request.

vLLM makes a sequence of each prompt in a list of prompts, and of each of ``n`` answers to a prompt.
Each of them takes a seat (``max_num_seqs``) of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.lines.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.lines.endpoints import Endpoint

_MOST: Final = 2**16
"""No engine takes more: a request that asks for more gets an error as its answer."""
_ANSWERS: Final = "n"
_NONE: Final = msgspec.Raw()


def _reader(endpoint: Endpoint) -> Callable[[bytes], Any]:
    """Reads the members that say how many, and skips all others."""
    fields = (*endpoint.prompt_lists, *((_ANSWERS,) if endpoint.writes_tokens else ()))
    members = msgspec.defstruct("Body", [(field, msgspec.Raw, _NONE) for field in fields])
    return msgspec.json.Decoder(members).decode


_READERS: Final = {
    path: _reader(endpoint)
    for path, endpoint in ENDPOINTS.items()
    if endpoint.prompt_lists or endpoint.writes_tokens
}
_read_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_number = msgspec.json.Decoder(int).decode


def sequences_of(url: str, body: bytes) -> int:
    """How many a request to the endpoint ``url`` is, at least 1; ``body`` is its JSON object.

    A body that cannot be read is one.
    """
    read = _READERS.get(url)
    if read is None:
        return 1
    try:
        members = read(body)
        lists = [prompts_in(getattr(members, field)) for field in ENDPOINTS[url].prompt_lists]
    except (msgspec.DecodeError, RecursionError):
        return 1
    return min(max(lists, default=1) * _answers(getattr(members, _ANSWERS, _NONE)), _MOST)


def prompts_in(value: msgspec.Raw) -> int:
    """How many prompts a JSON value holds, as OpenAI counts the inputs of embeddings.

    Text, or a list of tokens, is one. No values are made of what a client wrote. Raises
    :class:`msgspec.DecodeError`.
    """
    given = bytes(value)
    if not given.startswith(b"["):
        return 1
    elements = _read_elements(given)
    is_of_tokens = all(bytes(each).lstrip(b"-").isdigit() for each in elements)
    return 1 if is_of_tokens else len(elements)


def _answers(value: msgspec.Raw) -> int:
    given = bytes(value)
    try:
        return max(1, _read_number(given)) if given else 1
    except msgspec.DecodeError:
        return 1
