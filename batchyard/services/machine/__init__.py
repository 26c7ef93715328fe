"""This machine: folders, keys, connections, and the Python that has the engine."""
