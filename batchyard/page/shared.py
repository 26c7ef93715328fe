"""Answers that many open pages share: the database is asked once for all who look at the same."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

T = TypeVar("T")

KEPT_SECONDS: Final = 2.0
"""How long an answer is shown to others; pages ask every three seconds."""
_KEPT_TIMES: Final = 3
"""A slow answer is kept for three times as long as it took, to spare the database."""
_MOST_ANSWERS: Final = 256


@dataclass(slots=True)
class _Shared:
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    value: Any = None
    until: float = 0.0


class SharedAnswers:
    """The last answers, by question. One request asks; others with its question wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: OrderedDict[Hashable, _Shared] = OrderedDict()

    async def get(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, at most some seconds old. An error is raised to its request, not kept."""
        answer = self._answers.setdefault(question, _Shared())
        self._answers.move_to_end(question)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
        async with answer.asking:
            if self._clock() >= answer.until:
                began = self._clock()
                answer.value = await ask()
                now = self._clock()
                answer.until = now + max(KEPT_SECONDS, (now - began) * _KEPT_TIMES)
            value: T = answer.value
            return value

    def forget(self) -> None:
        """Drop all answers after a change: the user who made it looks at it next."""
        self._answers.clear()
