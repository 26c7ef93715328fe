"""How many bytes a tenant may have stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

# Only adds. Older code does not know the limit.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("max_stored_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "max_stored_bytes")
