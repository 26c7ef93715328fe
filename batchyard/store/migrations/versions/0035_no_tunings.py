"""Engines are not tuned any more, so what was measured of their options is not kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("tunings")


def downgrade() -> None:
    names = ("model", "device", "version", "options", "shape")
    op.create_table(
        "tunings",
        *(sa.Column(name, sa.String(), nullable=False) for name in names),
        sa.Column("planned", sa.String(), nullable=False),
        sa.Column("gains", sa.Text(), nullable=False),
        sa.Column("is_done", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*names, name="pk_tunings"),
    )
