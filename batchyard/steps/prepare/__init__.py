"""From an input file to a plan."""
