"""The index for lists of all tenants' batches, which are in the order of their creation."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# Older code neither knows of it nor needs it.
oldest_code = "0012"


def upgrade() -> None:
    op.create_index("ix_batches_created_at_id", "batches", ["created_at", "id"])


def downgrade() -> None:
    op.drop_index("ix_batches_created_at_id", table_name="batches")
