"""Batches that wait for room in their tenant's queue, and tenants whose batches do."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

# Only adds. Older code refuses what would wait.
oldest_code = "0037"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("when_full", sa.String(), nullable=True))
    op.add_column("batches", sa.Column("awaited_requests", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "awaited_requests")
    op.drop_column("tenants", "when_full")
