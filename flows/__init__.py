"""ORDER: what happens in which order, as Prefect flows. One flow per file.

Flows take a ``batch_id`` and can be run again at any time: each step looks at what is already
durable. What a step does is in ``batchyard.steps``, how it is retried in ``tasks``.
"""
