"""A year of an installation, in minutes: what grows without end, and how fast."""
