"""The rows of ``uploads`` and ``upload_parts``: what they are made from, what clients see of them.

Changing them is in ``uploads``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from sqlalchemy import BigInteger, Index
from sqlmodel import Field

from batchyard.store.columns import Row
from batchyard.wire import Upload, UploadPart, UploadStatus, new_part_id, new_upload_id

if TYPE_CHECKING:
    from batchyard.store.file.files import FileRecord

UPLOAD_LIFETIME_SECONDS: Final = 3600
"""An hour, as at OpenAI."""


class UploadRow(Row, table=True):
    """One row for each upload, for ever. Past ``expires_at`` a pending one counts as expired."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "status", "expires_at"),)

    id: str = Field(primary_key=True)
    tenant: str
    filename: str
    purpose: str
    bytes: int = Field(sa_type=BigInteger)
    mime_type: str
    status: str
    created_at: int = Field(sa_type=BigInteger)
    expires_at: int = Field(sa_type=BigInteger)
    file_lifetime_seconds: int | None = Field(sa_type=BigInteger)
    file_id: str | None


class UploadPartRow(Row, table=True):
    """One row for each part whose bytes are durable, until they are wiped."""

    __tablename__ = "upload_parts"
    __table_args__ = (Index(None, "upload_id"),)

    id: str = Field(primary_key=True)
    upload_id: str = Field(foreign_key="uploads.id", ondelete="CASCADE")
    size_bytes: int = Field(sa_type=BigInteger)
    sha256: str
    storage_key: str
    created_at: int = Field(sa_type=BigInteger)


UPLOADS = UploadRow.metadata.tables["uploads"]
PARTS = UploadPartRow.metadata.tables["upload_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """An upload to be. ``bytes`` is the length of the whole file."""

    id: str = field(default_factory=new_upload_id)
    tenant: str = "default"
    filename: str
    purpose: str
    bytes: int
    mime_type: str
    file_lifetime_seconds: int | None = None
    """From the file's creation to its expiry; ``None``: it is kept."""
    lifetime_seconds: int = UPLOAD_LIFETIME_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPart:
    """A part to be recorded. ``sha256`` is lower-case hex; its bytes are already durable."""

    id: str = field(default_factory=new_part_id)
    size_bytes: int
    sha256: str
    storage_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A part as the database has it."""

    id: str
    upload_id: str
    size_bytes: int
    sha256: str
    storage_key: str
    created_at: int

    def to_wire(self) -> UploadPart:
        """The UploadPart object that clients see."""
        return UploadPart(id=self.id, created_at=self.created_at, upload_id=self.upload_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRecord:
    """An upload as the database has it. Times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    mime_type: str
    status: UploadStatus
    created_at: int
    expires_at: int
    file_lifetime_seconds: int | None
    file_id: str | None

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
