"""The credentials for locations that users write as ``s3://bucket/key``."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from batchyard.storage.bucket import S3Credentials


class S3CredentialsBlock(Block):
    """Keys of an S3 account. What is empty, boto3 looks for where it always does."""

    _block_type_name = "Batchyard S3 credentials"
    _block_type_slug = "batchyard-s3-credentials"

    endpoint_url: str | None = Field(default=None, description="For servers other than AWS.")
    region: str | None = Field(default=None)
    access_key_id: str | None = Field(default=None)
    secret_access_key: SecretStr | None = Field(default=None)
    session_token: SecretStr | None = Field(default=None)

    def build(self) -> S3Credentials:
        secret, token = self.secret_access_key, self.session_token
        return S3Credentials(
            endpoint_url=self.endpoint_url,
            region=self.region,
            access_key_id=self.access_key_id,
            secret_access_key=secret.get_secret_value() if secret else None,
            session_token=token.get_secret_value() if token else None,
        )
