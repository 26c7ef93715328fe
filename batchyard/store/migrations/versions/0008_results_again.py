"""Results that are delivered again, forecasts that hold, a proof of the right sealing key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sealing_proof",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sealing_proof"),
    )
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("undelivered", sa.Text(), nullable=True))
        batches.add_column(sa.Column("late_since", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.add_column(sa.Column("file_id", sa.String(), nullable=True))
        deliveries.add_column(sa.Column("location", sa.Text(), nullable=True))
    # A forecast is of what runs.
    op.execute("UPDATE batches SET eta_at = NULL WHERE status != 'in_progress'")


def downgrade() -> None:
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.drop_column("location")
        deliveries.drop_column("file_id")
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("late_since")
        batches.drop_column("undelivered")
    op.drop_table("sealing_proof")
