"""What is said of a batch: its history, why it waits, its trace."""
