"""What a runner measures of its engine and of its batches."""
