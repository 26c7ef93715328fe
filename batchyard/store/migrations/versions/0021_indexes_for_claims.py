"""Indexes for claims: batches of a model that may have something to run, and those without owner.

Both are small, however many batches have ended.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

# Older code neither knows of it nor needs it.
oldest_code = "0012"


def upgrade() -> None:
    is_in_progress = sa.text("status = 'in_progress'")
    op.create_index(
        "ix_batches_in_progress",
        "batches",
        ["model", "expires_at"],
        sqlite_where=is_in_progress,
        postgresql_where=is_in_progress,
    )
    has_no_owner = sa.text(
        "owner IS NULL AND status IN ('cancelling', 'finalizing', 'in_progress', 'validating')"
    )
    op.create_index(
        "ix_batches_no_owner",
        "batches",
        ["tenant"],
        sqlite_where=has_no_owner,
        postgresql_where=has_no_owner,
    )


def downgrade() -> None:
    op.drop_index("ix_batches_no_owner", table_name="batches")
    op.drop_index("ix_batches_in_progress", table_name="batches")
