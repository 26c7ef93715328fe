"""Chunks: which pieces of a batch there are, and who runs which of them."""
