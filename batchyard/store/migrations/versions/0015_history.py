"""How a batch came along, in up to 200 points, and what each engine has to do now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# Older code neither writes nor reads them.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "batch_points",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("running", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_batch_points_batch_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "at", name="pk_batch_points"),
    )
    op.add_column("runners", sa.Column("load", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("runners", "load")
    op.drop_table("batch_points")
