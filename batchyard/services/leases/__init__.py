"""Leases of this process on batches, and how they are renewed."""
