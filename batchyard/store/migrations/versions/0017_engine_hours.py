"""When batches may use each model's engine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

# Older code runs batches at any time.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "engine_hours",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("windows", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("model", name="pk_engine_hours"),
    )


def downgrade() -> None:
    op.drop_table("engine_hours")
