"""The token that a Prefect server with CSRF protection wants with every change."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class CsrfToken:
    """The token of one client of one server.

    Fetched when the server asks for it, so that one without the protection is never asked.
    ``client`` and ``value``: where the server has given one already.
    """

    def __init__(self, client: str | None = None, value: str | None = None) -> None:
        self._client = client or str(uuid4())
        self._renewing = asyncio.Lock()
        self.value = value

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a call that changes something; empty without a token."""
        if self.value is None:
            return {}
        return {"Prefect-Csrf-Token": self.value, "Prefect-Csrf-Client": self._client}

    @property
    def path(self) -> str:
        """What to GET for a new one, under the address of the API."""
        return f"/csrf-token?client={self._client}"

    @asynccontextmanager
    async def renewal(self, *, refused: str | None) -> AsyncIterator[bool]:
        """Whether the block is to :meth:`take` a new token instead of the refused one.

        One block does for all calls that were refused with the same one: a new token ends the old
        one, so two calls that each get their own refuse each other.
        """
        async with self._renewing:
            yield self.value == refused

    def take(self, answer: Any) -> None:
        """Use the token in the server's answer. In any other answer there is none."""
        found = answer.get("token") if isinstance(answer, dict) else None
        self.value = found if isinstance(found, str) else None


def is_token_wanted(text: str) -> bool:
    """Whether the server says with 403 that a change had no token, or an old one."""
    return "CSRF token" in text
