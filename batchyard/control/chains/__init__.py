"""Chains: finished lines of one stage become the input of the next."""
