"""Runners that are jobs of a real Slurm cluster."""
