"""Alembic's folder: how the tables came to be, one revision after another."""
