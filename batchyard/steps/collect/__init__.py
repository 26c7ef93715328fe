"""The way from segments to published result files."""
