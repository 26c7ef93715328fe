"""From segments to published result files."""
