"""``/login`` and ``/logout``. A key is sent once, in a form, and is in no URL and no cookie."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from batchyard.api.http.auth import refuse_nul
from batchyard.api.http.session import (
    CSRF_FIELD,
    LOGIN_PATH,
    check_csrf,
    cookie_name,
    csrf_of,
    forget_session,
    is_same,
    local_path,
    read_form,
    session_holder,
    session_token,
    set_cookie,
    start_session,
)
from batchyard.errors import KeyExpired
from batchyard.logs import event_logger
from batchyard.page.html import render
from batchyard.store import acting_as
from batchyard.store.tenant.sessions import CODE_SECONDS

if TYPE_CHECKING:
    from batchyard.page.failed_logins import FailedLogins
    from batchyard.services.services import Services

log = event_logger(__name__)

router = APIRouter(include_in_schema=False)

_FORM_COOKIE = "batchyard_login"
"""A secret of a browser without a session. The token of the form is derived from it, so that the
form of another site cannot log the browser in as another user."""
_FORM_SECONDS = 3600
_UNKNOWN = "This key is unknown or revoked."
_USED = (
    f"This link was used before, or it is older than {CODE_SECONDS // 60} minutes. On the machine "
    "of the API, `batchyard keys login` prints a new one. Or log in with a key."
)
_OTHER_FORM = "The form was too old, or this browser keeps no cookies. Please try again."
_TOO_MANY = "Too many failed logins from your address. Please wait for {} s."


@router.get(LOGIN_PATH)
async def login_form(request: Request, code: str | None = None) -> Response:
    """The form, unless there is a session; a ``code`` opens one."""
    refuse_nul(request)
    back = local_path(request.query_params.get("next"))
    if code is not None:
        return await _log_in_with_code(request, code)
    if await session_holder(request) is not None:
        return RedirectResponse(back, status_code=303)
    return _form(request, back)


@router.post(LOGIN_PATH)
async def log_in(request: Request) -> Response:
    """Open a session with the rights of the key in the form."""
    fields = await read_form(request)
    back = local_path(fields.get("next"))
    secret = request.cookies.get(cookie_name(request, _FORM_COOKIE), "")
    if not secret or not is_same(csrf_of(secret), fields.get(CSRF_FIELD, "")):
        return _form(request, back, _OTHER_FORM, status=403)
    if wait := _failed_logins(request).wait_seconds(_address(request)):
        return _too_many(request, back, wait)
    services: Services = request.app.state.services
    try:
        holder = await services.store.api_keys.holder_of(fields.get("key", "").strip())
        message = _UNKNOWN
    except KeyExpired as error:
        holder, message = None, str(error)
    if holder is None:
        _failed_logins(request).note(_address(request))
        return _refused(request, back, message)
    token = await services.store.sessions.open(holder.key_id)
    with acting_as(holder.key_id):
        await services.store.audit.note("login", holder.key_id, tenant=holder.tenant, by="key")
    response = RedirectResponse(back, status_code=303, headers={"cache-control": "no-store"})
    await _begin(request, response, token)
    return response


@router.post("/logout")
async def log_out(request: Request) -> Response:
    """End the session, here and wherever else its cookie is."""
    token = session_token(request)
    response = RedirectResponse(LOGIN_PATH, status_code=303)
    if token is None:
        return response
    await check_csrf(request)
    services: Services = request.app.state.services
    await services.store.sessions.end(token)
    forget_session(request, response)
    return response


async def _log_in_with_code(request: Request, code: str) -> Response:
    if wait := _failed_logins(request).wait_seconds(_address(request)):
        return _too_many(request, "/", wait)
    services: Services = request.app.state.services
    token = await services.store.sessions.redeem(code)
    if token is None:
        if await session_holder(request) is not None:
            return RedirectResponse("/", status_code=303)  # the link was followed a second time
        # Not counted: an image on another site could ask with any code, and keep its visitors out.
        return _refused(request, "/", _USED)
    holder = await services.store.sessions.holder_of(token)
    if holder is not None:
        with acting_as(holder.key_id):
            await services.store.audit.note("login", holder.key_id, tenant=holder.tenant, by="link")
    # No redirect: after a link on another site, a browser would not send the new cookie with it.
    response = render("login.html", continue_to="/")
    await _begin(request, response, token)
    return response


async def _begin(request: Request, response: Response, token: str) -> None:
    """End the browser's earlier session: an attacker may have set its cookie."""
    before = session_token(request)
    if before is not None:
        await request.app.state.services.store.sessions.end(before)
    set_cookie(request, response, _FORM_COOKIE, "", 0)
    start_session(request, response, token)


def _refused(request: Request, back: str, message: str) -> Response:
    log.warning("login.failed", address=_address(request))
    return _form(request, back, message, status=401)


def _too_many(request: Request, back: str, wait_seconds: int) -> Response:
    response = _form(request, back, _TOO_MANY.format(wait_seconds), status=429)
    response.headers["retry-after"] = str(wait_seconds)
    return response


def _form(request: Request, back: str, message: str = "", *, status: int = 200) -> Response:
    secret = secrets.token_urlsafe(24)
    response = render("login.html", status=status, csrf=csrf_of(secret), next=back, message=message)
    set_cookie(request, response, _FORM_COOKIE, secret, _FORM_SECONDS)
    return response


def _failed_logins(request: Request) -> FailedLogins:
    found: FailedLogins = request.app.state.failed_logins
    return found


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
