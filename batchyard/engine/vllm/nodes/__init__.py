"""One engine over several machines: a leader, which has the API servers, and nodes that join it."""
