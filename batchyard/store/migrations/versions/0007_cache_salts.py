"""What separates tenants in an engine's prefix cache."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cache_salts",
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("salt", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("scope", name="pk_cache_salts"),
    )


def downgrade() -> None:
    op.drop_table("cache_salts")
