"""Finished lines in the object store."""
