"""What batches' prompts begin with, as hashes, so that those that begin alike run side by side."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

# Older code runs such batches one after the other.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "batch_roots",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("roots", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name="fk_batch_roots_batch_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch_id", name="pk_batch_roots"),
    )


def downgrade() -> None:
    op.drop_table("batch_roots")
