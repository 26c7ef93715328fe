"""Batches: their rows, every change of one, their leases, and the statuses that they have entered."""
