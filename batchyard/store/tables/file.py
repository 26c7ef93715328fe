"""The rows of ``files``: what they are made from, and what clients see of them.

Changing them is in ``files``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from sqlalchemy import BigInteger, Index
from sqlmodel import Field

from batchyard.database.columns import EnumText, Record, Row
from batchyard.wire import File, new_file_id

FILE_LIFETIME_SECONDS: Final = 2_592_000
"""30 days, as at OpenAI: what is usual, and the most that may be asked for."""
LEAST_LIFETIME_SECONDS: Final = 3600


class HiddenFor(StrEnum):
    """What a batch is for that its tenant neither created nor sees, or a file of one."""

    RESPONSES = "responses"
    """The lines are background responses."""
    CHAIN = "chain"
    """It has lines of one stage of a chain."""
    LEDGER = "ledger"
    """The file says what each line of a batch used and cost."""


class _FileColumns(Record):
    id: str = Field(default_factory=new_file_id, primary_key=True)
    tenant: str = "default"
    purpose: str
    filename: str
    size_bytes: int = Field(sa_type=BigInteger)
    sha256: str
    storage_key: str
    hidden_for: HiddenFor | None = Field(default=None, sa_type=EnumText(HiddenFor))
    """What it is for, if no list of its tenant's has it."""


class NewFile(_FileColumns):
    """A file to be recorded. ``sha256`` is lower-case hex; its bytes are already durable."""

    lifetime_seconds: int | None = FILE_LIFETIME_SECONDS
    """From its creation to its expiry; ``None``: it is kept."""


class FileRecord(_FileColumns):
    """A file as the database has it. Times are Unix seconds."""

    created_at: int = Field(sa_type=BigInteger)
    expires_at: int | None = Field(sa_type=BigInteger)
    deleted_at: int | None = Field(sa_type=BigInteger)

    def to_wire(self) -> File:
        """The File object that clients see."""
        return File(
            id=self.id,
            purpose=self.purpose,
            filename=self.filename,
            bytes=self.size_bytes,
            created_at=self.created_at,
            expires_at=self.expires_at,
        )


class FileRow(Row, FileRecord, table=True):
    """One row for each file whose bytes are durable; a deleted one stays for a month, marked."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "tenant", "created_at", "id"), Index(None, "storage_key"))


FILES = FileRow.metadata.tables["files"]
_IS_THERE = FILES.c.deleted_at.is_(None)
Index(
    "ix_files_expires_at",
    FILES.c.expires_at,
    FILES.c.id,
    sqlite_where=_IS_THERE,
    postgresql_where=_IS_THERE,
)
