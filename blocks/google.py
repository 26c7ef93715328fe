"""The credentials for locations that users write as ``gs://bucket/key``."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.storage.cloud_bucket import GoogleCredentials


class GoogleCredentialsBlock(Block):
    """A service account of Google Cloud. If it is empty, obstore looks in the environment."""

    _block_type_name = "Batchyard Google credentials"
    _block_type_slug = "batchyard-google-credentials"

    service_account_key: SecretStr = Field(
        default=SecretStr(""), description="The JSON of the service account's key."
    )
    endpoint_url: str = Field(default="", description="For servers other than Google's.")

    def build(self) -> GoogleCredentials:
        """The credentials as the product takes them."""
        return GoogleCredentials(
            service_account_key=self.service_account_key.get_secret_value(),
            endpoint_url=self.endpoint_url,
        )
