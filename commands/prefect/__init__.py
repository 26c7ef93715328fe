"""Prefect's server: our own, a closed one, and what is deployed on one."""
