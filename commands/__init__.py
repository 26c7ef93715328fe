"""PROCESSES: `batchyard run` and `batchyard up`, and the servers and workers that they start.

What happens in which order to a batch is in ``flows``.
"""
