"""A browser's session: its cookie, whose it is, and the token without which a form does nothing.

For the routes of the page. A session is a row, so it ends at its end, at a logout, and with its
key; the cookie holds a random token and nothing else. Routes depend on :data:`PageCaller`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import parse_qsl, quote

from fastapi import Depends, FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import READING, Caller, allowed, refuse_nul
from batchyard.api.http.body import body_stream
from batchyard.store.tenant.sessions import SESSION_SECONDS

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import Holder

CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"
LOGIN_PATH: Final = "/login"

_COOKIE = "batchyard_session"
_FORM_TYPE = "application/x-www-form-urlencoded"
_MAX_FORM_BYTES = 64 * 1024
_MAX_FIELDS = 100
_FORM_SECONDS = 30.0


class LoginNeeded(Exception):
    """There is no session: the browser is sent to the form, and back to where it was."""


async def page_caller(request: Request) -> Caller:
    """Whose session it is.

    A request that writes must have the session's CSRF token, in the header ``x-csrf-token`` or in
    the field ``csrf`` of its form, which is then :func:`form_of`. Raises :class:`LoginNeeded`,
    403 for a missing token and for a key that may only read, and 400, 408 and 413 for a form.
    """
    refuse_nul(request)
    holder = await session_holder(request)
    if holder is None:
        raise LoginNeeded
    caller = allowed(request, holder)
    if request.method not in READING:
        await check_csrf(request)
    return caller


PageCaller = Annotated[Caller, Depends(page_caller)]


async def session_holder(request: Request) -> Holder | None:
    """Whose session it is; None: there is none that is valid."""
    token = session_token(request)
    services: Services = request.app.state.services
    return None if token is None else await services.store.sessions.holder_of(token)


def session_token(request: Request) -> str | None:
    """What the browser says its session is."""
    return request.cookies.get(cookie_name(request, _COOKIE))


# -- cookies -------------------------------------------------------------------------------------


def start_session(request: Request, response: Response, token: str) -> None:
    """Give the browser the token of its new session."""
    set_cookie(request, response, _COOKIE, token, SESSION_SECONDS)


def forget_session(request: Request, response: Response) -> None:
    """Take the cookie away."""
    set_cookie(request, response, _COOKIE, "", 0)


def set_cookie(
    request: Request, response: Response, name: str, value: str, lifetime_seconds: int
) -> None:
    """A cookie that no script reads and no other site sends."""
    response.set_cookie(
        cookie_name(request, name),
        value,
        max_age=lifetime_seconds,
        httponly=True,
        samesite="strict",
        secure=_is_https(request),
        path="/",
    )


def cookie_name(request: Request, name: str) -> str:
    """With https a name that neither another host's cookie nor one over http can have."""
    return f"__Host-{name}" if _is_https(request) else name


def site_of(request: Request) -> str:
    """The address that the browser has loaded the page from, for commands that the page shows.

    Keys are sent there, so a proxy that ends TLS must not make it ``http://``.
    """
    scheme = "https" if _is_https(request) else "http"
    return f"{scheme}://{request.base_url.netloc}"


def _is_https(request: Request) -> bool:
    # uvicorn trusts only the configured proxies. A client that sends this header itself changes
    # only what is its own: a cookie, or commands on its page.
    forwarded = request.headers.get("x-forwarded-proto", "").split(",")[0].strip().lower()
    return request.url.scheme == "https" or forwarded == "https"


# -- forms ---------------------------------------------------------------------------------------


def csrf_token(request: Request) -> str:
    """For the forms of this session: ``<input type="hidden" name="csrf" value="…">``."""
    return csrf_of(session_token(request) or "")


def csrf_of(token: str) -> str:
    """Derived from a secret of the browser's, which cannot be derived from it."""
    return hmac.digest(token.encode("utf-8", "surrogatepass"), b"csrf", hashlib.sha256).hex()


async def check_csrf(request: Request) -> None:
    """Raise a 403 if the request does not come from a form, or a script, of this session."""
    given = request.headers.get(CSRF_HEADER)
    if given is None:
        given = (await read_form(request)).get(CSRF_FIELD, "")
    if not is_same(csrf_token(request), given):
        raise ApiError(
            403,
            "This form belongs to another session: load the page again, and send it once more.",
            code="csrf_failed",
        )


def is_same(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode("utf-8", "surrogatepass"))


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, of at most 64 KiB; none of a body of another type, which is not read.

    It is read once, and may be asked for again. Raises 400, 408, 413 and 415.
    """
    if not hasattr(request.state, "form"):
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        request.state.form = await _read_fields(request) if content_type == _FORM_TYPE else {}
    fields: dict[str, str] = request.state.form
    return fields


async def _read_fields(request: Request) -> dict[str, str]:
    data = bytearray()
    try:
        async with (
            asyncio.timeout(_FORM_SECONDS),
            contextlib.aclosing(body_stream(request)) as body,
        ):
            async for chunk in body:
                data += chunk
                if len(data) > _MAX_FORM_BYTES:
                    raise ApiError(413, f"A form may have {_MAX_FORM_BYTES} bytes.")
    except TimeoutError:
        raise ApiError(408, "The form arrived too slowly.") from None
    try:
        fields = dict(
            parse_qsl(
                data.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
            )
        )
    except ValueError:  # no UTF-8, or too many fields
        raise ApiError(400, "The form cannot be read.") from None
    if any("\0" in value for value in fields.values()):
        raise ApiError(400, "A form must not hold a NUL.")
    return fields


# -- without a session ---------------------------------------------------------------------------


def send_to_login(app: FastAPI) -> None:
    """Answer :class:`LoginNeeded`."""
    app.add_exception_handler(LoginNeeded, _login_needed)


async def _login_needed(request: Request, _: Exception) -> Response:
    where = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    back = where if request.method == "GET" else "/"
    headers = {"cache-control": "no-store"}
    if "hx-request" in request.headers:
        # htmx would put the form into the middle of the page.
        return Response(status_code=401, headers={**headers, "hx-redirect": LOGIN_PATH})
    target = LOGIN_PATH if back == "/" else f"{LOGIN_PATH}?next={quote(back, safe='/')}"
    return RedirectResponse(target, status_code=303, headers=headers)


def local_path(text: str | None) -> str:
    """Where to go after the login: a path of this site, and ``/`` for everything else."""
    if text and re.fullmatch(r"/(?![/\\])[!-\[\]-~]*", text):
        return text
    return "/"
