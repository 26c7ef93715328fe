"""The way from a request for a batch to its row."""
