"""Batches: their rows, every change of one, their leases, and their history of statuses."""
