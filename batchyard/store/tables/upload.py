"""The rows of ``uploads`` and ``upload_parts``: what they are made from, what clients see of them.

Changing them is in ``uploads``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from sqlalchemy import BigInteger, Index
from sqlmodel import AutoString, Field

from batchyard.database.columns import Record, Row
from batchyard.wire import Upload, UploadPart, UploadStatus, new_part_id, new_upload_id

if TYPE_CHECKING:
    from batchyard.store.tables.file import FileRecord

UPLOAD_LIFETIME_SECONDS: Final = 3600
"""An hour, as at OpenAI."""


class _UploadColumns(Record):
    id: str = Field(default_factory=new_upload_id, primary_key=True)
    tenant: str = "default"
    filename: str
    purpose: str
    bytes: int = Field(sa_type=BigInteger)
    """The length of the whole file."""
    mime_type: str
    file_lifetime_seconds: int | None = Field(default=None, sa_type=BigInteger)
    """From the file's creation to its expiry; ``None``: it is kept."""


class NewUpload(_UploadColumns):
    """An upload to be."""

    lifetime_seconds: int = UPLOAD_LIFETIME_SECONDS


class UploadRecord(_UploadColumns):
    """An upload as the database has it. Times are Unix seconds."""

    status: UploadStatus = Field(sa_type=AutoString)
    created_at: int = Field(sa_type=BigInteger)
    expires_at: int = Field(sa_type=BigInteger)
    file_id: str | None
    completion_fingerprint: str | None
    """A hash of the request that completed it, to recognise the same request."""

    def to_wire(self, file: FileRecord | None = None) -> Upload:
        """The Upload object that clients see, with its ``file`` once it is completed."""
        return Upload(
            id=self.id,
            bytes=self.bytes,
            created_at=self.created_at,
            filename=self.filename,
            purpose=self.purpose,
            status=self.status,
            expires_at=self.expires_at,
            file=msgspec.UNSET if file is None else file.to_wire(),
        )


class UploadRow(Row, UploadRecord, table=True):
    """One row for each upload, until a month after its hour. A pending one expires at
    ``expires_at``."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "status", "expires_at"),)


class NewPart(Record):
    """A part to be recorded. ``sha256`` is lower-case hex; its bytes are already durable."""

    id: str = Field(default_factory=new_part_id, primary_key=True)
    size_bytes: int = Field(sa_type=BigInteger)
    sha256: str
    storage_key: str


class PartRecord(NewPart):
    """A part as the database has it."""

    upload_id: str = Field(foreign_key="uploads.id", ondelete="CASCADE")
    created_at: int = Field(sa_type=BigInteger)

    def to_wire(self) -> UploadPart:
        """The UploadPart object that clients see."""
        return UploadPart(id=self.id, created_at=self.created_at, upload_id=self.upload_id)


class UploadPartRow(Row, PartRecord, table=True):
    """One row for each part whose bytes are durable, until they are wiped."""

    __tablename__ = "upload_parts"
    __table_args__ = (Index(None, "upload_id"),)


UPLOADS = UploadRow.metadata.tables["uploads"]
PARTS = UploadPartRow.metadata.tables["upload_parts"]
