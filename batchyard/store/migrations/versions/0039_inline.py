"""Batches that only `batchyard run` runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

# Only adds. Older code runs such batches on any engine of their model.
oldest_code = "0037"


def upgrade() -> None:
    op.add_column(
        "batches",
        sa.Column("is_inline", sa.Boolean(), server_default=sa.false(), nullable=False),
    )


def downgrade() -> None:
    op.drop_column("batches", "is_inline")
