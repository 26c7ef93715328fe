"""Which options were fastest for an engine, by the shape of its work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

# Older code neither writes nor reads it.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "tunings",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("options", sa.String(), nullable=False),
        sa.Column("shape", sa.String(), nullable=False),
        sa.Column("planned", sa.String(), nullable=False),
        sa.Column("gains", sa.Text(), nullable=False),
        sa.Column("is_done", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "model", "device", "version", "options", "shape", name="pk_tunings"
        ),
    )


def downgrade() -> None:
    op.drop_table("tunings")
