"""Routes of Anthropic's Messages and Message Batches."""
