"""What is known about stored bytes."""
