"""Owners that withdraw their requests from the window."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Withdrawal:
    in_flight: int
    callers: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Withdrawals(dict[Hashable, _Withdrawal]):
    """By owner, each until none of its requests is in flight. A dictionary: ``in`` it is looked for
    each request."""

    async def until_gone(self, owner: Hashable, in_flight: int) -> None:
        """The owner withdraws; return when all these requests have left, or at the end."""
        withdrawal = self.setdefault(owner, _Withdrawal(in_flight))
        withdrawal.callers += 1
        try:
            await withdrawal.is_over.wait()
        finally:
            withdrawal.callers -= 1
            self._forget_if_gone(owner)

    def left(self, owner: Hashable) -> None:
        """A request of an owner that withdraws has left."""
        withdrawal = self[owner]
        withdrawal.in_flight -= 1
        if not withdrawal.in_flight:
            withdrawal.is_over.set()
        self._forget_if_gone(owner)

    def end(self) -> None:
        """The window has ended, and with it every request."""
        for withdrawal in self.values():
            withdrawal.is_over.set()
        self.clear()

    def _forget_if_gone(self, owner: Hashable) -> None:
        # Not before until_gone() goes on: a submission that waits for a slot may get one of those
        # that have just become free, and must find that its owner is leaving.
        withdrawal = self.get(owner)
        if withdrawal is not None and not (withdrawal.in_flight or withdrawal.callers):
            del self[owner]
