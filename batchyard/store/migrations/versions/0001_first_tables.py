"""The first tables: files, batches, chunks, runners."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_files()
    _create_batches()
    _create_chunks()
    _create_runners()


def downgrade() -> None:
    for table in ("runners", "chunks", "batches", "files"):
        op.drop_table(table)


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("storage_key", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("input_file_id", sa.String(), nullable=False),
        sa.Column("output_file_id", sa.String(), nullable=True),
        sa.Column("error_file_id", sa.String(), nullable=True),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_at", sa.BigInteger(), nullable=True),
        sa.Column("finalizing_at", sa.BigInteger(), nullable=True),
        sa.Column("completed_at", sa.BigInteger(), nullable=True),
        sa.Column("failed_at", sa.BigInteger(), nullable=True),
        sa.Column("expired_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelling_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelled_at", sa.BigInteger(), nullable=True),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        *_usage_columns(),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("order_policy", sa.String(), nullable=True),
        sa.Column("plan_key", sa.String(), nullable=True),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("input_location", sa.Text(), nullable=True),
        sa.Column("output_location", sa.Text(), nullable=True),
        sa.Column("error_location", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_status_expires_at", "batches", ["status", "expires_at"])


def _create_chunks() -> None:
    op.create_table(
        "chunks",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("deadline", sa.BigInteger(), nullable=False),
        sa.Column("first_record", sa.BigInteger(), nullable=False),
        sa.Column("request_count", sa.BigInteger(), nullable=False),
        sa.Column("token_estimate", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        *_usage_columns(),
        sa.PrimaryKeyConstraint("batch_id", "index", name="pk_chunks"),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_chunks_batch_id", ondelete="CASCADE"
        ),
    )
    is_open = sa.text("status != 'done'")
    op.create_index(
        "ix_chunks_open",
        "chunks",
        ["model", "batch_id", "index"],
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
    is_leased = sa.text("status = 'leased'")
    op.create_index(
        "ix_chunks_leased",
        "chunks",
        ["owner"],
        sqlite_where=is_leased,
        postgresql_where=is_leased,
    )


def _create_runners() -> None:
    op.create_table(
        "runners",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runners"),
    )
    op.create_index(
        "ix_runners_model_status_heartbeat_at", "runners", ["model", "status", "heartbeat_at"]
    )


def _usage_columns() -> list[sa.Column[int]]:
    return [
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("total_tokens", sa.BigInteger(), nullable=False),
    ]
