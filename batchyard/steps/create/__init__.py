"""From a request for a batch to its row."""
