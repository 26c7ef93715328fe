"""Batchyard: the OpenAI Batch format on your own GPUs.

The product in plain Python. Nothing in this package imports Prefect: the orchestrator
stays at the edge, in ``flows``, ``tasks`` and ``blocks``.
"""

__version__ = "0.3.0"
