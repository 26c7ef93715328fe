"""Commands for operators of the service."""
