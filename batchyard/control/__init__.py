"""The process that takes batches to their ends: leases, the next step, the reconciler."""
