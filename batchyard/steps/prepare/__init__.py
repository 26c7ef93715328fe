"""The way from an input file to a plan."""
