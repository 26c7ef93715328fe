"""The token that a Prefect server with CSRF protection wants with every change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    import aiohttp


class CsrfToken:
    """Fetched when the server asks for it, so that one without the protection is never asked."""

    def __init__(self, session: aiohttp.ClientSession, api_url: str) -> None:
        self._session = session
        self._url = f"{api_url}/csrf-token"
        self._client = str(uuid4())
        self._renewing = asyncio.Lock()
        self.value: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a call that changes something; empty without a token."""
        if self.value is None:
            return {}
        return {"Prefect-Csrf-Token": self.value, "Prefect-Csrf-Client": self._client}

    async def is_wanted_by(self, response: aiohttp.ClientResponse) -> bool:
        """The request had no token, or an expired one."""
        return response.status == 403 and "CSRF token" in await response.text()

    async def renew(self, *, refused: str | None) -> None:
        """Get a token instead of the refused one.

        Once for all calls that were refused with the same one: a new token ends the old one.
        """
        async with self._renewing:
            if self.value != refused:
                return
            async with self._session.get(self._url, params={"client": self._client}) as response:
                response.raise_for_status()
                found = await response.json()
            self.value = str(found.get("token")) if isinstance(found, dict) else None
