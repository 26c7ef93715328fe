"""Measured claims: one command each, CPU only, ratios within one run. `make bench` runs all."""
