"""The credentials for locations that users write as ``hf://datasets/OWNER/NAME/PATH``."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.storage.hub_repository import HubCredentials


class HubCredentialsBlock(Block):
    """A token of a Hugging Face hub. If it is empty, huggingface_hub looks in the environment."""

    _block_type_name = "Batchyard hub credentials"
    _block_type_slug = "batchyard-hub-credentials"

    token: SecretStr = Field(
        default=SecretStr(""), description="With the right to write, if results go to the hub."
    )
    endpoint_url: str = Field(default="", description="For hubs other than huggingface.co.")

    def build(self) -> HubCredentials:
        """The credentials as the product takes them."""
        return HubCredentials(token=self.token.get_secret_value(), endpoint_url=self.endpoint_url)
