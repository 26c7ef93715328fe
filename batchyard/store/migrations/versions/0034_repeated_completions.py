"""Which request completed an upload, so that the same request again has the same answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

# Only adds. Older code refuses such a request.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("uploads", sa.Column("completion_fingerprint", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("uploads", "completion_fingerprint")
