"""WHICH engine, WHICH bucket: Prefect blocks that an operator edits while flows run.

A block here is its fields and a ``build()`` that makes the product's object. No logic, no I/O.
"""

from batchyard.storage.bucket import S3Credentials
from batchyard.storage.cloud_bucket import AzureCredentials, GoogleCredentials
from batchyard.storage.hub_repository import HubCredentials
from blocks.azure import AzureCredentialsBlock
from blocks.engines import RemoteEngineBlock, VllmEngineBlock
from blocks.google import GoogleCredentialsBlock
from blocks.hub import HubCredentialsBlock
from blocks.s3 import S3CredentialsBlock

__all__ = [
    "CREDENTIALS",
    "AzureCredentialsBlock",
    "GoogleCredentialsBlock",
    "HubCredentialsBlock",
    "RemoteEngineBlock",
    "S3CredentialsBlock",
    "VllmEngineBlock",
]

CREDENTIALS = {
    S3Credentials: S3CredentialsBlock,
    AzureCredentials: AzureCredentialsBlock,
    GoogleCredentials: GoogleCredentialsBlock,
    HubCredentials: HubCredentialsBlock,
}
"""The credentials of users' locations, and the block that makes each."""
