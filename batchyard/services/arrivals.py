"""Bytes of tenants that are on their way into the object store, and that no row counts yet.

Each process knows its own: of several, each may let a tenant have as much as its quota leaves.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Final

from batchyard.services.quotas import default_quota

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    from batchyard.services.services import Services

_LEAST_STEP_BYTES: Final = 64 * 1024
_MOST_STEP_BYTES: Final = 16 * 1024**2
"""What a tenant has stored takes time to add up."""


class Arrivals:
    """How many bytes of each tenant this process is storing beyond what their rows announce."""

    def __init__(self) -> None:
        self._of_tenants: Counter[str] = Counter()
        self._of_uploads: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        """Of all its files and parts."""
        return self._of_tenants[tenant]

    def add(self, tenant: str, size_bytes: int) -> None:
        """Count bytes of a file; below zero, they are stored, or are not to be."""
        _add(self._of_tenants, tenant, size_bytes)

    def add_part(self, tenant: str, upload_id: str, announced_bytes: int, size_bytes: int) -> None:
        """The same for a part of an upload, of which so many bytes count already."""
        before = max(0, self._of_uploads[upload_id] - announced_bytes)
        _add(self._of_uploads, upload_id, size_bytes)
        self.add(tenant, max(0, self._of_uploads[upload_id] - announced_bytes) - before)


def _add(counter: Counter[str], key: str, number: int) -> None:
    counter[key] += number
    if not counter[key]:
        del counter[key]


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
