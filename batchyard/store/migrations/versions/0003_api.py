"""What the HTTP API needs: keys, uploads, idempotency, places in lists, wishes of a batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_PLACE = ["tenant", "created_at", "id"]


def upgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("output_lifetime_seconds", sa.BigInteger(), nullable=True))
        batches.add_column(sa.Column("webhook_location", sa.Text(), nullable=True))
        batches.add_column(sa.Column("notify_email", sa.String(), nullable=True))
    op.create_index("ix_batches_tenant_created_at_id", "batches", _PLACE)
    op.create_index("ix_files_tenant_created_at_id", "files", _PLACE)
    op.create_index("ix_files_storage_key", "files", ["storage_key"])
    _create_api_keys()
    _create_uploads()
    _create_upload_parts()
    _create_idempotency()


def downgrade() -> None:
    for table in ("idempotency", "upload_parts", "uploads", "api_keys"):
        op.drop_table(table)
    op.drop_index("ix_files_storage_key", "files")
    op.drop_index("ix_files_tenant_created_at_id", "files")
    op.drop_index("ix_batches_tenant_created_at_id", "batches")
    with op.batch_alter_table("batches") as batches:
        for name in ("output_lifetime_seconds", "webhook_location", "notify_email"):
            batches.drop_column(name)


def _create_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("key_hash", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_index("ix_api_keys_key_hash", "api_keys", ["key_hash"], unique=True)


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("mime_type", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("file_lifetime_seconds", sa.BigInteger(), nullable=True),
        sa.Column("file_id", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
    )
    op.create_index("ix_uploads_status_expires_at", "uploads", ["status", "expires_at"])


def _create_upload_parts() -> None:
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("upload_id", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_upload_parts"),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name="fk_upload_parts_upload_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_upload_parts_upload_id", "upload_parts", ["upload_id"])


def _create_idempotency() -> None:
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("answer_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "route", "key", name="pk_idempotency"),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])
