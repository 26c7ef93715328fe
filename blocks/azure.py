"""The credentials for locations that users write as ``az://container/key``."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.storage.cloud_bucket import AzureCredentials


class AzureCredentialsBlock(Block):
    """An account of Azure Blob Storage. What is empty, obstore looks for in the environment."""

    _block_type_name = "Batchyard Azure credentials"
    _block_type_slug = "batchyard-azure-credentials"

    account_name: str = Field(default="")
    account_key: SecretStr = Field(default=SecretStr(""))
    sas_token: SecretStr = Field(default=SecretStr(""), description="In place of the key.")
    tenant_id: str = Field(default="", description="With client_id: a service principal.")
    client_id: str = Field(default="")
    client_secret: SecretStr = Field(default=SecretStr(""))
    endpoint_url: str = Field(default="", description="For accounts that are not at Azure.")

    def build(self) -> AzureCredentials:
        """The credentials as the product takes them."""
        return AzureCredentials(
            account_name=self.account_name,
            account_key=self.account_key.get_secret_value(),
            sas_token=self.sas_token.get_secret_value(),
            tenant_id=self.tenant_id,
            client_id=self.client_id,
            client_secret=self.client_secret.get_secret_value(),
            endpoint_url=self.endpoint_url,
        )
