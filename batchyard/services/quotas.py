"""The quotas of tenants that have none of their own, from the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.store import Quota

if TYPE_CHECKING:
    from batchyard.services.services import Services


def default_quota(services: Services) -> Quota:
    """For tenants that have none of their own."""
    quota = services.settings.quota
    return Quota(
        max_active_batches=quota.active_batches,
        max_enqueued_requests=quota.enqueued_requests,
        max_enqueued_tokens=quota.enqueued_tokens,
        max_stored_bytes=quota.stored_bytes,
        max_live_requests=quota.live_requests,
    )
