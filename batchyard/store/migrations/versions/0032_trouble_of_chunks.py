"""Why nothing of a chunk runs or is made durable."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

# Only adds. Older code does not say why a batch waits.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("chunks", sa.Column("trouble", sa.String(), nullable=True))
    in_trouble = sa.text("trouble IS NOT NULL")
    op.create_index(
        "ix_chunks_trouble",
        "chunks",
        ["batch_id"],
        sqlite_where=in_trouble,
        postgresql_where=in_trouble,
    )


def downgrade() -> None:
    op.drop_index("ix_chunks_trouble", table_name="chunks")
    op.drop_column("chunks", "trouble")
