"""Which batches go first, which runners there should be, and when a batch will be done."""
