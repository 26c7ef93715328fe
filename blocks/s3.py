"""The credentials for locations that users write as ``s3://bucket/key``."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.storage.bucket import S3Credentials


class S3CredentialsBlock(Block):
    """Keys of an S3 account. What is empty, boto3 looks for where it always does."""

    _block_type_name = "Batchyard S3 credentials"
    _block_type_slug = "batchyard-s3-credentials"

    endpoint_url: str = Field(default="", description="For servers other than AWS.")
    region: str = Field(default="")
    access_key_id: str = Field(default="")
    secret_access_key: SecretStr = Field(default=SecretStr(""))
    session_token: SecretStr = Field(default=SecretStr(""))

    def build(self) -> S3Credentials:
        """The credentials as the product takes them."""
        return S3Credentials(
            endpoint_url=self.endpoint_url,
            region=self.region,
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key.get_secret_value(),
            session_token=self.session_token.get_secret_value(),
        )
