"""Batches that were created as Message Batches: how many requests each has, and an index for them.

The index has no row of any other batch.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

# Older code creates none, and runs them as it runs all others.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("batches", sa.Column("message_requests", sa.BigInteger(), nullable=True))
    is_message_batch = sa.text("message_requests IS NOT NULL")
    op.create_index(
        "ix_batches_messages",
        "batches",
        ["tenant", "created_at", "id"],
        sqlite_where=is_message_batch,
        postgresql_where=is_message_batch,
    )


def downgrade() -> None:
    op.drop_index("ix_batches_messages", table_name="batches")
    op.drop_column("batches", "message_requests")
