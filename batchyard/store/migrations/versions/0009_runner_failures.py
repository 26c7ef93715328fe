"""On which machine a runner was, what it answered, how it failed; why a batch waits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runners") as runners:
        runners.add_column(sa.Column("machine", sa.String(), nullable=True))
        runners.add_column(sa.Column("failure", sa.String(), nullable=True))
        runners.add_column(
            sa.Column("answered", sa.BigInteger(), nullable=False, server_default="0")
        )
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("wait_reason", sa.String(), nullable=True))
    with op.batch_alter_table("runners") as runners:
        # The default was for the rows that were there; the models have none.
        runners.alter_column("answered", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("wait_reason")
    with op.batch_alter_table("runners") as runners:
        for name in ("answered", "failure", "machine"):
            runners.drop_column(name)
