"""The outbox's workers: notifications and result files, sent until they have arrived."""
