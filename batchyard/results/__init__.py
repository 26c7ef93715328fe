"""What a result line is, and what becomes of answers that are not as they should be."""
