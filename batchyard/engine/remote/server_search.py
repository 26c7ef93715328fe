"""Find out once which of its possible addresses a server answers at.

A server whose list of models is at one of them is found. Some have no such list, or one of another
form: then JSON in its place, an OpenAPI document, or an endpoint that answers anything but "not
found" to an empty request shows that the server is there. If nothing does, lines would all get
that answer, so the engine is not started.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from batchyard.engine.remote.server_address import MODELS, without_endpoint
from batchyard.engine.remote.server_client import Look
from batchyard.engine.routes import is_served, post_routes
from batchyard.engine.sharing.metrics_look import AWAY_STATUSES
from batchyard.errors import EngineNotReady, EngineStartFailed
from batchyard.lines.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchyard.engine.remote.server_address import ServerAddress

    Ask = Callable[[str, bytes | None], Awaitable[Look]]
    """GETs a URL, or POSTs a body to it."""

_EMPTY: Final = b"{}"
"""No endpoint does anything for a request without a model, messages, a prompt or an input."""
_SILENT: Final = Look(0, b"", "")
"""Of a URL that gives no answer, on a server that gives others."""
_ABSENT: Final = frozenset({404, 405, 501})
_REFUSED: Final = frozenset({401, 403})


class Found(NamedTuple):
    """Where the server is, and the models that it lists; None: it has no list."""

    address: ServerAddress
    models: set[str] | None
    listing: bytes = b""
    """The list as it came."""


async def find_server(addresses: Sequence[ServerAddress], ask: Ask) -> Found:
    """Raises :class:`~batchyard.errors.EngineStartFailed`, or ``EngineNotReady`` if it may pass."""
    looks: list[Look] = []
    for address in addresses:
        question = ask(address.url(MODELS), None)
        look = await (_or_silence(question) if looks else question)
        models = listed_models(look.body) if look.status < 300 else None
        if models is not None:
            return Found(address, models, look.body)
        looks.append(look)
    # A gateway may refuse paths that it does not have, so nothing is concluded from the second one.
    check_look(addresses[0], looks[0])
    for address, look in zip(addresses, looks, strict=True):
        if look.status < 300 and _is_json(look.body):
            return Found(address, None)
    if _speaks_https(addresses[0], looks[0]):
        raise EngineStartFailed(
            f"the engine at {addresses[0].shown} answers HTTP 400, so it may only speak https: try "
            f"{addresses[0].shown.replace('http:', 'https:', 1)}"
        )
    found = await _with_an_endpoint(addresses, ask)
    if found is None:
        raise EngineStartFailed(_words(addresses, looks))
    return Found(found, None)


def check_look(address: ServerAddress, look: Look) -> None:
    """Raise as :func:`find_server` for an answer that says that we get no others now.

    500 says that the list cannot be made: some servers without a cache of models answer so.
    """
    if look.status in _REFUSED:
        raise EngineStartFailed(
            f"the engine at {address.shown} refuses our API key (HTTP {look.status})"
        )
    if look.status in AWAY_STATUSES:
        raise EngineNotReady(f"the engine at {address.shown} is not ready (HTTP {look.status})")


async def _with_an_endpoint(addresses: Sequence[ServerAddress], ask: Ask) -> ServerAddress | None:
    first = addresses[0]
    document = await _or_silence(ask(first.url("/openapi.json"), None))
    routes = post_routes(document.body) if document.status == 200 else None
    if routes is not None and any(is_served(path, routes) for path in ENDPOINTS):
        return first
    refusals = []
    # Below a path, both are usual.
    has_two = len(addresses) > 1 and bool(urlsplit(first.base).path)
    for path in ENDPOINTS:
        # The two differ by it only.
        for address in addresses if path.startswith("/v1/") else addresses[:1]:
            try:
                look = await ask(address.url(path), _EMPTY)
            except EngineNotReady as error:
                if isinstance(error.__cause__, TimeoutError):
                    return address  # it has taken the request
                raise
            if look.status == HTTPStatus.TOO_MANY_REQUESTS and has_two:
                raise EngineNotReady(
                    f"the engine at {first.shown} takes no requests now (HTTP 429), so it is not "
                    "known where its endpoints are"
                )
            if look.status in _REFUSED | AWAY_STATUSES:
                refusals.append(look)
            elif look.status not in _ABSENT and not 300 <= look.status < 400:
                return address
    for look in refusals:
        check_look(first, look)
    return None


async def _or_silence(question: Awaitable[Look]) -> Look:
    try:
        return await question
    except EngineNotReady:
        return _SILENT


def _speaks_https(address: ServerAddress, look: Look) -> bool:
    """Whether this may be the page by which nginx and others answer what is not TLS."""
    is_page = look.status == HTTPStatus.BAD_REQUEST and not _is_json(look.body)
    return is_page and address.shown.startswith("http:")


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    return True


def _words(addresses: Sequence[ServerAddress], looks: Sequence[Look]) -> str:
    """Why nothing was found: what was asked, what came, and what to do."""
    base = addresses[0].shown
    redirect = next((look for look in looks if look.location), None)
    if redirect is not None:
        target = redirect.location.removesuffix("/models")
        advice = f"use {target}" if target != redirect.location else "use the URL of the API itself"
        return (
            f"the engine at {base} redirects to {redirect.location} (HTTP {redirect.status}), and "
            f"redirects are not followed: {advice}"
        )
    told = " and ".join(
        f"{f'HTTP {look.status}' if look.status else 'no answer'} at {address.url(MODELS)}"
        for address, look in zip(addresses, looks, strict=True)
    )
    shorter = without_endpoint(base)
    advice = (
        "check the URL, which is what comes before /chat/completions"
        if shorter is None
        else f"the URL ends in an endpoint, so use {shorter}"
    )
    return f"the engine at {base} has no list of models ({told}) and no endpoint: {advice}"


def listed_models(body: bytes) -> set[str] | None:
    """The names in the answer of ``/v1/models``; None if it is no such list."""
    try:
        return {model.id for model in _decode_list(body).data}
    except (ValueError, RecursionError):
        return None


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


_decode_list = msgspec.json.Decoder(_ModelList).decode
