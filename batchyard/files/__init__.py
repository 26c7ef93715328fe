"""Clients' files: uploaded whole or in parts, deleted, expired."""
