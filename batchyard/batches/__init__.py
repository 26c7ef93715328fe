"""What a batch is, as values. Nothing here reads a database or a file."""
