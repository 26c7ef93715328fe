"""Commands for batches."""
