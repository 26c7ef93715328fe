"""What kept a batch from being faster, in words."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_SECONDS: Final = 5.0
"""Nothing is said of a shorter time."""


class Bound(StrEnum):
    """What the lines of a batch waited for at one moment."""

    ENGINE = "engine"
    FRONT_END = "front_end"
    INPUT = "input"
    PROCESS = "process"
    STORAGE = "storage"
    REFUSALS = "refusals"
    OTHERS = "others"
    TOO_FEW = "too_few"


_WORDS: Final = {
    Bound.ENGINE: (
        "the engine, which had as many requests as it can run. More GPUs or other engine options "
        "may make it faster"
    ),
    Bound.FRONT_END: (
        "the engine's front end: requests waited in its API processes while its core had room. "
        "--api-server-count gives it more of them"
    ),
    Bound.INPUT: (
        "its input: lines, or files that they name, took longer to read than to answer. A faster "
        "source makes it faster"
    ),
    Bound.PROCESS: (
        "Batchyard's own process, which had no processor time left. A faster processor makes it "
        "faster, or less other work on this machine"
    ),
    Bound.STORAGE: "the object store, which takes results more slowly than they come",
    Bound.REFUSALS: (
        "refusals of the engine's server (429, 503 and the like). Higher limits of the server "
        "make it faster"
    ),
    Bound.OTHERS: "other users of the engine: batches that go first, or live requests",
    Bound.TOO_FEW: (
        "too few requests in flight: the engine had room for more. Larger batches, several at "
        "once, or a larger max_num_seqs in the block of a server fill it"
    ),
}


def bound_words(seconds: Mapping[str, float]) -> str:
    """What it waited for most of the time, and what to change; empty: it was too short to say.

    ``seconds``: how long it waited for each :class:`Bound`.
    """
    total = sum(seconds.values())
    if total < LEAST_SECONDS:
        return ""
    most = max(seconds, key=lambda name: seconds[name])
    return f"{seconds[most] / total:.0%} of the time by {_WORDS[Bound(most)]}"
