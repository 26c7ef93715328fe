"""Live requests beside the batch, over the runner's own server."""
