"""Runners: which processes lease batches or chunks, and how fast they were."""
