"""Cut a block of code short from another task, once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Interruption:
    """An async context manager whose block ends early, and in silence, after :meth:`now`.

    The block gets one cancellation. Within anyio's cancel scopes it would get one at each
    ``await``, those of its clean-up included: an upload could not be aborted, and a thread that
    still writes to a file could not be waited for.
    """

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._is_wanted = False
        self._is_open = False

    @property
    def has_happened(self) -> bool:
        """Whether the block was cut short."""
        return self._scope.expired()

    def now(self) -> None:
        """End the block. Before it begins: it ends at its first ``await``. After it: no effect.

        A second call has no effect either: the block may be cleaning up already.
        """
        if self._is_wanted:
            return
        self._is_wanted = True
        if self._is_open:
            self._interrupt()

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._is_open = True
        if self._is_wanted:
            self._interrupt()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._is_open = False
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            # Raised by the scope, in place of the cancellation that it made itself.
            return True
        return False

    def _interrupt(self) -> None:
        self._scope.reschedule(asyncio.get_running_loop().time())
