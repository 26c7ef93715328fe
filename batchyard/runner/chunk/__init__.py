"""One chunk: in which order its lines are sent, and how its finished lines are written."""
