"""What a batch is, as values: its options, its chain, its prices, its background responses."""
