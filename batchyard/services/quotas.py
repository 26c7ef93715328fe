"""The quotas of tenants that have none of their own, and bytes that arrive within a quota."""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Final

from batchyard.store import Quota, WhenFull

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    from batchyard.services.services import Services


_LEAST_STEP_BYTES: Final = 64 * 1024
_MOST_STEP_BYTES: Final = 16 * 1024**2
"""What a tenant has stored takes time to add up."""


def default_quota(services: Services) -> Quota:
    """For tenants that have none of their own."""
    quota = services.settings.quota
    return Quota(
        max_active_batches=quota.active_batches,
        max_enqueued_requests=quota.enqueued_requests,
        max_enqueued_tokens=quota.enqueued_tokens,
        max_stored_bytes=quota.stored_bytes,
        max_live_requests=quota.live_requests,
        when_full=WhenFull(quota.when_full),
    )


@contextmanager
def arriving(
    services: Services, tenant: str, *, add: Callable[[int], None] | None = None
) -> Iterator[Callable[[AsyncGenerator[bytes]], AsyncIterator[bytes]]]:
    """Gives a function that passes bytes on, and raises as soon as the quota has no room for them.

    They count until the block ends, together with all that arrive at the same time: a tenant
    could otherwise fill the disk with a hundred bodies that do not end. ``add`` counts them in
    another way than :meth:`Arrivals.add`. It raises
    :class:`~batchyard.errors.StorageLimitExceeded`, and errors of the store.
    """
    counted = 0
    arrivals = services.arrivals

    def count(size_bytes: int) -> None:
        nonlocal counted
        counted += size_bytes
        if add is None:
            arrivals.add(tenant, size_bytes)
        else:
            add(size_bytes)

    async def within_quota(parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
        check_at = _LEAST_STEP_BYTES
        # Else a connection that the bytes come from would stay open after a refusal.
        async with aclosing(parts) as stream:
            async for part in stream:
                count(len(part))
                if counted >= check_at:
                    check_at = counted + min(counted, _MOST_STEP_BYTES)
                    await services.store.tenants.check_room(
                        tenant, default_quota(services), stored_bytes=arrivals.of(tenant)
                    )
                yield part

    try:
        yield within_quota
    finally:
        count(-counted)
