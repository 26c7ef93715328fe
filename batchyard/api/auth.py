"""Who asks: the Bearer key names the tenant. No route works without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from batchyard.api.errors import ApiError

if TYPE_CHECKING:
    from batchyard.services.services import Services

_CHALLENGE = {"www-authenticate": "Bearer"}
_BEARER = HTTPBearer(scheme_name="ApiKey", auto_error=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of the key, and what its requests work with."""

    tenant: str
    services: Services


async def authenticated(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
) -> Caller:
    """The caller. Raises 401; runs before any of the body is read."""
    if "\0" in request.url.path or any("\0" in value for value in request.query_params.values()):
        # PostgreSQL would not even compare it.
        raise ApiError(400, "A URL must not hold a NUL.")
    if bearer is None:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it in an Authorization header with Bearer auth, "
            "that is, Authorization: Bearer YOUR_KEY.",
            headers=_CHALLENGE,
        )
    services: Services = request.app.state.services
    tenant = await services.store.api_keys.tenant_of(bearer.credentials)
    if tenant is None:
        raise ApiError(
            401,
            "Incorrect API key provided: it is unknown or revoked.",
            code="invalid_api_key",
            headers=_CHALLENGE,
        )
    return Caller(tenant, services)


Authenticated = Annotated[Caller, Depends(authenticated)]
