"""Bytes of tenants that are on their way into the object store, and that no row counts yet.

Each process knows its own: of several, each may let a tenant have as much as its quota leaves.
"""

from __future__ import annotations

from collections import Counter


class Arrivals:
    """How many bytes of each tenant this process is storing beyond what their rows announce."""

    def __init__(self) -> None:
        self._of_tenants: Counter[str] = Counter()
        self._of_uploads: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        """The bytes of all files and parts that arrive for the tenant."""
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
