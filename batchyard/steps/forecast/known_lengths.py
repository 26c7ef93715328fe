"""What is known of how long a tenant's answers are, for a plan. A plan is made without it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.plan.lengths import LengthHistory

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import Store

log = event_logger(__name__)

KnownLengths = tuple[LengthHistory, bytes]
"""Lengths of answers, and the key by which templates are known."""


async def known_lengths(services: Services, tenant: str, model: str) -> KnownLengths:
    """The lengths, and the tenant's key of the hashes that stand for templates.

    Both are empty if they cannot be read: then nothing is learned of the batch's templates.
    """
    store = services.store
    try:
        secret = await store.cache_salts.get(scope_of_templates(tenant))
        return await store.lengths.of(tenant, model), secret.encode()
    except Exception as error:  # noqa: BLE001 - a plan is made without them, whatever it is
        log.warning("lengths.not_read", describe(error), tenant=tenant)
        return LengthHistory(), b""


async def read_lengths(store: Store, tenant: str, model: str) -> KnownLengths:
    """The same, without making a key for a tenant that has none.

    Raises :class:`~batchyard.errors.StoreError`.
    """
    secret = await store.cache_salts.find(scope_of_templates(tenant)) or ""
    return await store.lengths.of(tenant, model), secret.encode()


async def nothing_learned(model: str) -> KnownLengths:  # noqa: ARG001 - the signature of others
    """No lengths of answers, and no key to know templates by."""
    return LengthHistory(), b""


def scope_of_templates(tenant: str) -> str:
    """The scope of the secret among the cache salts with which the tenant's templates are
    hashed."""
    return f"templates:{tenant}"
