"""What has gone wrong in a chunk, and until when it is not tried again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("chunks") as chunks:
        chunks.add_column(sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"))
        chunks.add_column(sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
        chunks.add_column(sa.Column("not_before", sa.Double(), nullable=True))
    with op.batch_alter_table("chunks") as chunks:
        # The defaults were for the rows that were there; the models have none.
        chunks.alter_column("strikes", server_default=None)
        chunks.alter_column("deaths", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("chunks") as chunks:
        chunks.drop_column("not_before")
        chunks.drop_column("deaths")
        chunks.drop_column("strikes")
