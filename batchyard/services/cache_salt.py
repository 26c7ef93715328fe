"""What separates a tenant's prompts from those of others in an engine's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchyard.services.services import Services


async def cache_salt_of(services: Services, tenant: str) -> str | None:
    """The salt of the tenant's cache; None: it is the one that all share.

    Raises :class:`~batchyard.errors.StoreError`.
    """
    scope = services.settings.cache_scope(tenant)
    return None if scope is None else await services.store.cache_salts.get(scope)
