"""What clients may set for a webhook: its URL, its name, its events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from batchyard.errors import LocationRefused, RequestRefused
from batchyard.notify.event import EVENT_TYPES
from batchyard.web.resolve import check_address
from batchyard.web.url import checked_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.settings import Settings

MAX_NAME_CHARS: Final = 256
MAX_URL_CHARS: Final = 8192


async def check_webhook_url(url: str, settings: Settings, *, param: str) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for what is no https URL.

    Also for one that leads to private addresses only; what it leads to is checked again when
    something is sent. Where the operator allows private URLs, http is accepted as well.
    """
    if len(url) > MAX_URL_CHARS:
        raise RequestRefused(
            f"'{param}' may have {MAX_URL_CHARS} characters.",
            param=param,
            code="string_above_max_length",
        )
    schemes = "https?" if settings.allow_private_urls else "https"
    if not re.match(rf"{schemes}://", url, re.IGNORECASE):
        raise _refused(param, f"'{param}' must be an https:// URL.")
    try:
        checked_url(url)
        await check_address(url, settings.address_guard)
    except LocationRefused as error:
        raise _refused(param, f"'{param}' cannot be used: {error}.") from None


def check_name(name: str) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for an invalid name of an endpoint."""
    if not name.strip():
        raise _refused("name", "'name' must not be empty.")
    if len(name) > MAX_NAME_CHARS:
        raise RequestRefused(
            f"'name' may have {MAX_NAME_CHARS} characters.",
            param="name",
            code="string_above_max_length",
        )


def checked_event_types(event_types: Sequence[str], *, param: str) -> tuple[str, ...]:
    """List each type once, in their order. Raises :class:`~batchyard.errors.RequestRefused`."""
    offered = ", ".join(EVENT_TYPES)
    if not event_types:
        raise _refused(param, f"'{param}' must name at least one of: {offered}.")
    for each in event_types:
        if each not in EVENT_TYPES:
            raise _refused(param, f"There is no event type '{each[:64]}' here, only: {offered}.")
    return tuple(dict.fromkeys(event_types))


def _refused(param: str, message: str) -> RequestRefused:
    return RequestRefused(message, param=param, code="invalid_value")
