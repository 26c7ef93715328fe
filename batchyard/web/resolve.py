"""Whether a client's URL leads to refused addresses only: told when it is given, not days later.

This protects nothing, for a name can change what it means: what is connected to is checked again
each time, by the guard. So a name that is not known now is no error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from batchyard.errors import LocationRefused
from batchyard.web.address import AddressRefused
from batchyard.web.lookup import Lookups
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from batchyard.web.address import AddressGuard

_SECONDS: Final = 2.0
_LOOKUPS: Final = Lookups(16)
"""Their own, since names can be given faster than they are connected to: they take no turn of a
request. Where all are taken, nothing is found out."""


async def check_address(url: str, guard: AddressGuard | None) -> None:
    """Raise :class:`~batchyard.errors.LocationRefused` if the guard refuses all addresses of a URL.

    Nothing is raised for a name that has no address, or that is not answered for within two
    seconds. ``guard`` None: every address is allowed.
    """
    if guard is None:
        return
    target = checked_url(url)
    assert target.host is not None  # noqa: S101 - checked
    refusals = []
    for place in await _places(target.host, target.port or 0):
        try:
            guard.check(place)
        except AddressRefused as error:
            refusals.append(error)
        else:
            return
    if refusals:
        raise LocationRefused(f"{shown(url)} may not be used: {refusals[0]}")


async def _places(host: str, port: int) -> list[Any]:
    try:
        async with asyncio.timeout(_SECONDS):
            entries = await _LOOKUPS.entries(host)
    except (TimeoutError, OSError, UnicodeError):
        return []
    return [(address, port, *more) for *_, (address, _, *more) in entries]
