"""Routes of batches, their events and their results."""
