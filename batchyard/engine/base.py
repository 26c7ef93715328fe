"""Inference, as the rest of the product sees it: requests in, answers out, as they finish."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
    from pathlib import Path

    from batchyard.engine.objective import Objective
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.lines.body_fields import Routes


@dataclass(frozen=True, slots=True)
class BatchTraits:
    """What the engine must know of a request that is the same for all of its batch in a chunk."""

    cache_salt: str | None = None
    """Only requests with the same salt share what the engine has cached of prompts; None: those
    without one. It is made of letters, digits, ``-`` and ``_``."""
    traceparent: str | None = None
    """The span that the engine's own spans continue, as the W3C's header; None: tracing is off."""
    is_awaited: bool = False
    """Other batches are made of their answers. The engine is not told."""


NO_TRAITS: Final = BatchTraits()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request of a batch. ``body`` is forwarded byte for byte."""

    tag: int
    """The caller's number for it; unique among the requests in flight on one stream."""
    url: str
    """The route, for example ``/v1/chat/completions``."""
    body: bytes
    request_id: str
    """Sent as ``X-Request-Id``, so that our files and the engine's log can be joined."""
    content_type: str = "application/json"
    """The media type of the body, without a space in it."""
    of_batch: BatchTraits = NO_TRAITS
    sequences: int = 1
    """How many the engine makes of it; each takes a seat."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends the request with this ``tag`` on the same stream, and no other."""

    tag: int


class NoAnswer(StrEnum):
    """Why a request got no HTTP answer."""

    ABORTED = "aborted"
    """The caller's :class:`Abort` ended it."""
    CONNECTION_LOST = "connection_lost"
    EMPTY = "empty_answer"
    """There was a good status, and nothing else."""
    FAILED = "failed"
    """Our own code failed as it sent the request or read its answer; ``reason`` says how."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The engine's answer to the request with the same ``tag``.

    Exactly one of ``status`` (an HTTP status, with ``body`` as it came) and ``no_answer`` is set.
    """

    tag: int
    status: int | None
    body: bytes = b""
    retry_after_seconds: float | None = None
    no_answer: NoAnswer | None = None
    reason: str = ""
    """The name of an exception's type, never its text: that may quote the request."""
    content_type: str = ""
    """Of the body; empty if it is not known."""
    location: str = ""
    """Where a redirect leads, without credentials and query."""


def http_answer(
    tag: int,
    status: int,
    body: bytes,
    retry_after_seconds: float | None = None,
    *,
    content_type: str = "",
    location: str = "",
) -> EngineAnswer:
    """The answer that came over HTTP; 502 where HTTP has no final status of that number.

    A good status with nothing is :data:`NoAnswer.EMPTY`: vLLM answers 200 and ``null``, or
    nothing, to a request that was aborted in it.
    """
    if 200 <= status < 300 and body.strip() in _NOTHING:
        return EngineAnswer(tag, None, no_answer=NoAnswer.EMPTY)
    status = status if 200 <= status <= 599 else 502
    return EngineAnswer(
        tag, status, body, retry_after_seconds, content_type=content_type, location=location
    )


_NOTHING: Final = (b"", b"null")
"""No set: to look into one, Python would hash each whole answer."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far the engine's start has come, for people to look at."""

    message: str
    fraction: float | None = None
    """0 to 1 where it is known."""


@dataclass(frozen=True, slots=True)
class LivePromise:
    """What the users of an engine that takes live requests have, while a batch runs there too."""

    objective: Objective | None = None
    reserve_seats: int | None = None
    """How many of its places always stay free for them; None: as the runner sees fit."""


@dataclass(frozen=True, slots=True)
class LiveServer:
    """The HTTP server of an engine that takes live requests beside those of batches."""

    socket: Path
    """The Unix socket that only we reach."""
    headers: Mapping[str, str]
    """What each request carries to be let in."""
    promise: LivePromise


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an engine is, as it says itself, with the requests of all its users."""

    running: float
    """Sequences that it computes."""
    waiting: float
    """Sequences that wait in its core."""
    cache_used: float | None = None
    """The share of its KV cache that they use, 0 to 1; None: not known."""


class Gate(Protocol):
    """Says whether an engine that others use has room for one more request."""

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent now."""
        ...

    async def watch(self, on_open: Callable[[], None], has_requests: Callable[[], bool]) -> None:
        """Observe the engine until cancelled; ``on_open`` is called while there is room.

        ``has_requests`` says whether any wait here. Raises nothing.
        """
        ...


class Engine(Protocol):
    """One inference server: a process that we start and stop, or a remote server."""

    model: str
    """The model name that request bodies carry."""

    adapters: frozenset[str]
    """The names of the model's adapters, which request bodies may carry instead."""

    is_batch_invariant: bool
    """Whether an answer does not depend on what runs beside it; False: not known."""

    @property
    def max_num_seqs(self) -> int:
        """How many sequences the engine runs at once."""
        ...

    @property
    def window_size(self) -> int:
        """How many requests a runner keeps in flight. Known once ``start`` has returned."""
        ...

    @property
    def gate(self) -> Gate | None:
        """What a request waits for before it is sent; None where no one else uses the engine."""
        ...

    @property
    def metrics_socket(self) -> Path | None:
        """The Unix socket with ``/metrics`` that only we reach; None: there is none now."""
        ...

    @property
    def live_server(self) -> LiveServer | None:
        """Where it takes live requests; None: it is for batches only, or does not run."""
        ...

    @property
    def prompt_counter(self) -> CounterProgram | None:
        """What counts prompts as the engine would, without it; None: only the engine itself."""
        ...

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Return once the engine answers. Raises :class:`~batchyard.errors.EngineStartFailed`."""
        ...

    async def stop(self) -> None:
        """Stop what ``start`` started, if anything; safe to call twice or before ``start``."""
        ...

    async def routes(self) -> Routes | None:
        """What takes POST requests, from the engine's own description; None: it has none.

        Raises :class:`~batchyard.errors.EngineLost` when the engine's server gives no answer.
        """
        ...

    async def work_done(self) -> float | None:
        """A number that changes as the engine makes progress on any request; None: not known.

        It counts tokens, so it grows, but for what it says of prompts that are half read. It
        stands still while the engine hangs. Raises :class:`~batchyard.errors.EngineLost` when
        the engine's server gives no answer.
        """
        ...

    async def occupancy(self) -> Occupancy | None:
        """How full it is now; None: not known.

        Raises :class:`~batchyard.errors.EngineLost` when the engine's server gives no answer.
        """
        ...

    def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
    ) -> AsyncGenerator[EngineAnswer, None]:
        """Send requests as ``requests`` yields them and yield answers as they finish, any order.

        The caller bounds what is in flight by when ``requests`` yields. ``timeout_seconds`` is
        each request's own; one that outlasts it is aborted and answered ``NoAnswer.TIMEOUT``.
        An :class:`Abort` ends its request in the engine; one for a tag that is not in flight is
        ignored. Every request gets exactly one answer: an aborted one ``NoAnswer.ABORTED``, or
        its real one if that was on its way already. Closing the generator aborts whatever is in
        flight. Raises
        :class:`~batchyard.errors.EngineLost` when the engine itself goes away.
        """
        ...
