"""Who asks, and what they may do: a key, or a browser's session, names the tenant.

The key comes as ``Authorization: Bearer``, or as ``x-api-key``, as Anthropic's clients send it.

No route works without one. What a key allows is decided here, once for all routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from batchyard.api.http.api_error import ApiError
from batchyard.errors import KeyExpired
from batchyard.store import act_as

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import Holder

_CHALLENGE = {"www-authenticate": "Bearer"}
_BEARER = HTTPBearer(scheme_name="ApiKey", auto_error=False)
_KEY_HEADER = APIKeyHeader(name="x-api-key", scheme_name="XApiKey", auto_error=False)
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""The methods of requests that change nothing."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, what the key allows, and what the request works with."""

    tenant: str
    services: Services
    key_id: str
    is_operator: bool
    """It may see all tenants' batches, and act on them, where a route offers that."""
    may_write: bool

    @property
    def sees_tenant(self) -> str | None:
        """The tenant whose batches and usage are shown; None, for an operator: all tenants."""
        return None if self.is_operator else self.tenant


async def authenticated(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    key_header: Annotated[str | None, Depends(_KEY_HEADER)],
) -> Caller:
    """The caller. Raises 401 and 403; runs before any of the body is read."""
    refuse_nul(request)
    secret = bearer.credentials if bearer is not None else key_header
    if not secret:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in an Authorization header with Bearer auth, "
            "that is, Authorization: Bearer YOUR_KEY.",
            headers=_CHALLENGE,
        )
    services: Services = request.app.state.services
    try:
        holder = await services.store.api_keys.holder_of(secret)
    except KeyExpired as error:
        raise _incorrect(f"{error} Ask your operator for a new one.") from None
    if holder is None:
        raise _incorrect("Incorrect API key provided: it is unknown or revoked.")
    return allowed(request, holder)


Authenticated = Annotated[Caller, Depends(authenticated)]


def allowed(request: Request, holder: Holder) -> Caller:
    """The caller, if the key allows a request with this method. Raises 403.

    What an operator does in this request is recorded in the audit log.
    """
    if request.method not in READING and not holder.may_write:
        raise ApiError(
            403,
            "You have insufficient permissions for this operation: this API key is read-only.",
            code="insufficient_permissions",
        )
    if holder.is_operator:
        # Each request is a task of its own.
        act_as(holder.key_id)
    return Caller(
        holder.tenant,
        request.app.state.services,
        holder.key_id,
        is_operator=holder.is_operator,
        may_write=holder.may_write,
    )


def refuse_nul(request: Request) -> None:
    """Raise a 400 for a NUL in the URL, which PostgreSQL would not even compare."""
    # Of a parameter that is repeated, ``values()`` has only the last value.
    values = (value for _, value in request.query_params.multi_items())
    if "\0" in request.url.path or any("\0" in value for value in values):
        raise ApiError(400, "A URL must not hold a NUL.")


def _incorrect(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
