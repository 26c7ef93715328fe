"""Others that use a runner's engine beside its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from batchyard.engine.base import Abort, EngineAnswer, EngineRequest, Gate
    from batchyard.engine.sharing.gate import Streaming


class Quiet(Protocol):
    """A window of requests, as far as others in its engine have to know it."""

    @property
    def needs_quiet(self) -> bool:
        """Whether a request is to run alone, to show whether it crashes the engine."""
        ...


class OtherTraffic(Protocol):
    """Others that use the same engine through this process."""

    def join(self, window: Quiet) -> Gate:
        """What each request of the window waits for from now on."""
        ...

    def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], answers_of: Streaming
    ) -> AsyncGenerator[EngineAnswer, None]:
        """What ``answers_of`` makes of the window's requests, which are counted meanwhile."""
        ...

    def is_here(self) -> bool:
        """Whether the engine has requests of theirs now."""
        ...

    def was_here(self, since: float) -> bool:
        """Whether it has, or had some a moment ago, after ``since`` by the monotonic clock."""
        ...
