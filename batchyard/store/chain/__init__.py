"""Chains: their rows, and the only writer of them."""
