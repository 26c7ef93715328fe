"""In what order a batch is run is in its plan; nothing reads it from the row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("order_policy")


def downgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("order_policy", sa.String(), nullable=True))
