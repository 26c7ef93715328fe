"""How many requests of a batch have another one's answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(
            sa.Column("deduplicated_requests", sa.BigInteger(), nullable=False, server_default="0")
        )
    with op.batch_alter_table("batches") as batches:
        # The default was for the rows that were there; the models have none.
        batches.alter_column("deduplicated_requests", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("deduplicated_requests")
