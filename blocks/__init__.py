"""WHICH engine, WHICH bucket: Prefect blocks that an operator edits while flows run.

A block here is its fields and a ``build()`` that makes the product's object. No logic, no I/O.
"""

from blocks.engines import RemoteEngineBlock, VllmEngineBlock
from blocks.s3 import S3CredentialsBlock

__all__ = ["RemoteEngineBlock", "S3CredentialsBlock", "VllmEngineBlock"]
