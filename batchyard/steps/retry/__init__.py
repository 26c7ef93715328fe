"""From failed lines to a new batch."""
