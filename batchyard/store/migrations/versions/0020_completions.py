"""The order in which the lines of a batch were found to be finished."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# Older code neither writes nor reads it.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "completions",
        sa.Column("segment", sa.String(), nullable=False),
        sa.Column("lines", sa.LargeBinary(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_completions_batch_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "sequence", name="pk_completions"),
    )


def downgrade() -> None:
    op.drop_table("completions")
