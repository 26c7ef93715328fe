"""The way from failed lines to a new batch."""
