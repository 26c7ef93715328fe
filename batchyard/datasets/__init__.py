"""Datasets: rows that a template turns into requests, and results as rows again.

``template`` and ``files`` know no Arrow. ``tables``, ``render`` and ``join`` do: they run in
processes of their own, which ``process`` starts, so that neither a template nor a file of a client
occupies the process that takes batches through their lives. pyarrow is the extra ``datasets``.
"""
